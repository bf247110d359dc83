-- The order of the queue: pending, returned and the lanes together, lowest score first, equal scores by the bytes of
-- the member. Entries of a lane with `goes_first` go before all others of their priority, by score among themselves.
-- Uses: common, byte_order

-- Compare two requests by their place in the queue.
local function is_before(a, b)
  if a.score_value ~= b.score_value then return a.score_value < b.score_value end
  if a.goes_first ~= b.goes_first then return a.goes_first end
  if a.own_score ~= b.own_score then return a.own_score < b.own_score end
  if a.tie_break ~= b.tie_break then return is_bytewise_before(a.tie_break, b.tie_break) end
  -- If two members have the same bytes, the one that was claimed before is first.
  return (a.id or math.huge) < (b.id or math.huge)
end

-- Set what orders a request in the queue: its score and, if it is in a lane, the lane.
local function set_place(candidate, score, lane)
  candidate.score_value, candidate.goes_first = parse_score(score), lane and lane.goes_first or false
  candidate.own_score = candidate.score_value
  if candidate.goes_first then
    local value = candidate.score_value
    -- The lowest score of the priority (requests/score.py). The product of a very large number may be rounded up.
    candidate.score_value = math.min(value, math.floor(value / PRIORITY_STEP) * PRIORITY_STEP)
  end
end

-- Read the request at one rank of a set. Requests are read one by one, because members may be large: at most one is
-- read in vain for each set.
local function read_head(source, at)
  local key = WAITING_SETS[source]
  local row = call('ZRANGE', key, at, at, 'WITHSCORES')
  if not row[1] then return nil end
  local name = row[1]
  local candidate = {name = name, score = row[2]}
  set_place(candidate, row[2], LANES[source - 2])
  if key == PENDING then
    candidate.tie_break = string.sub(name, 1, PREFIX_BYTES)
    candidate.size = #name
  else
    -- The name is the beginning of the member, a zero byte and the entry with 16 digits (`ordered_name`).
    candidate.tie_break = string.sub(name, 1, -18)
    candidate.id = tonumber(string.sub(name, -16))
    candidate.size = call('HSTRLEN', MEMBERS, candidate.id)
  end
  return candidate
end

-- Return 1 while one unit is reserved for a probe that found no room, otherwise 0.
local function units_reserved_for_probe(shared, now, lease_s)
  local reserved_s = (shared.probe_waits or 0) - now
  return reserved_s > 0 and reserved_s <= lease_s and 1 or 0
end

-- Select the first requests of the queue: up to `max_count`, until their members sum up to `max_bytes` (but at least
-- one; with `room`, their blobs count as well), within `room` units (nil: whatever they need), and from each lane
-- as many as `room_by_lane` allows (nil: all, but none of a closed lane). Return them, and the number of pending ones
-- among them.
--
-- A request that was never leased counts `assumed_units`. A request that needs more than the limit is passed over,
-- because no end of a lease would make room for it. A request that needs more than the room ends the selection, because
-- it would starve if lighter requests behind it were always taken; but up to `max_blocked` of them are passed over. The
-- selection also ends when no unit is left, because a request that counts nothing now will count something before it is
-- sent. The third result is the entry of the first request without room, 0 if there was none.
local function select_first(max_count, max_bytes, room_by_lane, room, limit, assumed_units, max_blocked)
  local selected, size, passed_over, blocked, blocked_count = {}, 0, 0, 0, 0
  local ranks, heads, remaining = {}, {}, {}
  for source = 1, #WAITING_SETS do
    local lane = LANES[source - 2]
    ranks[source], remaining[source] =
      0, lane and (lane.closed and 0 or room_by_lane and room_by_lane[source - 2]) or math.huge
  end
  while #selected < max_count and (not room or room >= 1) do
    local best
    for source = 1, #WAITING_SETS do
      if heads[source] == nil then
        heads[source] = remaining[source] > 0 and read_head(source, ranks[source]) or false
      end
      if heads[source] and (not best or is_before(heads[source], heads[best])) then best = source end
    end
    if not best then break end
    local candidate = heads[best]
    candidate.state = candidate.id and room and load_entry(candidate.id)
    local needed = candidate.state and get_units(candidate.state) or assumed_units
    if room and needed > limit then
      passed_over = passed_over + 1
      -- A pending request cannot be passed over: a claim removes pending ones by rank, from the first on.
      if not candidate.id or passed_over > MAX_PASSED_OVER then break end
    elseif room and needed > room then
      -- A pending request cannot be passed over here, either.
      if not candidate.id then break end
      if blocked == 0 then blocked = candidate.id end
      blocked_count = blocked_count + 1
      if blocked_count > max_blocked then break end
    else
      size = size + candidate.size + (candidate.state and get_blob_bytes(candidate.state) or 0)
      if #selected > 0 and size > max_bytes then break end
      candidate.source, candidate.units = WAITING_SETS[best], needed
      selected[#selected + 1] = candidate
      if room then room = room - needed end
      remaining[best] = remaining[best] - 1
    end
    ranks[best] = ranks[best] + 1
    heads[best] = nil
  end
  return selected, ranks[1], blocked
end
