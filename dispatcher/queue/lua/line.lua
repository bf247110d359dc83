-- The line: pending, returned and lanes merged, best score first, ties by bytes.

local earlier -- of two of the line
do

-- Bytes decide, not the server's locale (Lua's own < would ask it).
local function before(a, b)
  local same, most = 0, math.min(#a, #b)
  while same < most do
    local half = math.floor((same + most + 1) / 2)
    if string.sub(a, 1, half) == string.sub(b, 1, half) then same = half else most = half - 1 end
  end
  if same == #a or same == #b then return #a < #b end
  return string.byte(a, same + 1) < string.byte(b, same + 1)
end

function earlier(a, b)
  if a.number ~= b.number then return a.number < b.number end
  if a.tie ~= b.tie then return before(a.tie, b.tie) end
  -- The same bytes: the one that was claimed before goes first.
  return (a.id or math.huge) < (b.id or math.huge)
end
end

-- The heads of the sets are read one by one: members may be large, and so at most one is read for nothing.
local function head(key, at)
  local found = call('ZRANGE', key, at, at, 'WITHSCORES')
  if not found[1] then return nil end
  local name_ = found[1]
  local one = {name = name_, score = found[2], number = number_of(found[2])}
  if key == PENDING then
    one.tie = string.sub(name_, 1, PREFIX_BYTES)
    one.size = #name_
  else
    one.tie = string.sub(name_, 1, -18)
    one.id = tonumber(string.sub(name_, -16))
    one.size = call('HSTRLEN', MEMBERS, one.id)
  end
  return one
end

-- One unit is kept for a probe that found none.
local function kept_for_probe(shared, now, lease_s)
  local waits_s = (shared.probe_waits or 0) - now
  return waits_s > 0 and waits_s <= lease_s and 1 or 0
end

-- Up to `most` from the front of the line, until their members sum to `bytes` (one at least), within `room` units (nil:
-- whatever they weigh), and of each lane as many as `rooms` has (nil: all; none of a closed one); and how many of them
-- are pending.
-- Who never was leased is taken to weigh `units`. One that is heavier than the limit itself is passed over: no end of
-- a lease makes room for it. Before one that is heavier than the room the line ends: it would starve behind others.
-- So it does where no room is left: what weighs nothing will weigh something before it is sent.
local function first(most, bytes, rooms, room, limit, units)
  local found, size, passed = {}, 0, 0
  local at, heads, left = {}, {}, {}
  for source = 1, #WAITING do
    local lane = LANES[source - 2]
    at[source], left[source] = 0, lane and (lane.closed and 0 or rooms and rooms[source - 2]) or math.huge
  end
  while #found < most and (not room or room >= 1) do
    local best
    for source, set in ipairs(WAITING) do
      if heads[source] == nil then heads[source] = left[source] > 0 and head(set, at[source]) or false end
      if heads[source] and (not best or earlier(heads[source], heads[best])) then best = source end
    end
    if not best then break end
    local one = heads[best]
    one.state = one.id and room and load(one.id)
    local weighs = one.state and units_of(one.state) or units
    if room and weighs > limit then
      passed = passed + 1
      if not one.id or passed > PASSED_MOST then break end
    elseif room and weighs > room then
      break
    else
      size = size + one.size
      if #found > 0 and size > bytes then break end
      one.source, one.weighs = WAITING[best], weighs
      found[#found + 1] = one
      if room then room = room - weighs end
      left[best] = left[best] - 1
    end
    at[best] = at[best] + 1
    heads[best] = nil
  end
  return found, at[1]
end
