-- Lease the first requests of the queue to one owner.
-- Uses: owner_commands, common, queue_order
-- Keys: queue, REPLY
-- Arguments: owner, owner_timeout_s: number, lease_s: number, max_count: number, max_bytes: number, token_base,
--     reply_s, is_probe: flag, limit: number, read_at: number, lost_units: number, retry_after_max_s: number,
--     unleased_units: number, max_member_bytes: number, assumed_units: number, max_blocked: number
-- List rooms: lane, room: number
-- REPLY is the key of the record of this claim, by owner and nonce. `unleased_units` are units of the limit that no
-- lease counts, and `assumed_units` those of a request that was never leased. `rooms` has the largest number of leases
-- of a lane by its letter, 0 for the others.
-- `max_blocked` is the number of requests without room that lighter ones may overtake.
-- Returns {owner reply, number of waiting requests, lease rows, entry of the first request without room or 0}.
--         A request of more than `max_bytes` is returned alone.
--         A member of more is returned as its length, because it needs a call and a timeout of its own. A blob that does not
--         fit beside the member is returned as its length, too.
-- Guarantees: the units of all leases, and those that no lease counts, never pass the limit because of a claim. A
-- request is in exactly one place. The same nonce within reply_s claims nothing more. Only one probe runs at a time,
-- until its lease ends or its owner claims without probing. A probe that finds no room reserves the next unit that
-- becomes free, because the owners that use up the limit would claim it as well. The reservation ends when the
-- probing owner would count as dead.
local now, shared = current_time(), load_control()
local lease_rows, recorded, blocked = {}, call('GET', REPLY), 0
features.require_stored(shared)
correct_future_times(shared, now)

local room_by_lane = {}
for number, lane in ipairs(LANES) do
  room_by_lane[number] = 0
  for _, row in ipairs(rooms) do
    if row.lane == lane.letter and is_open(lane) then room_by_lane[number] = row.room end
  end
end

local function add_lease(id, state, member)
  local blob = load_blob(id, state, #member, max_bytes)
  if #member > max_bytes then member = #member end
  add_lease_row(lease_rows, id, state, member, blob)
  local lane = choose_lane(state)
  if lane then room_by_lane[lane] = room_by_lane[lane] - 1 end
end

-- Return the limit and the part of it that is free.
local function get_limit_and_room()
  if is_probe and shared.probe then return 0, 0 end
  local shared_limit = share_and_get_limit(shared, now, limit, read_at, lost_units, retry_after_max_s)
  if not shared_limit then return 0, 0 end
  local free = shared_limit - count_live_units(shared) - unleased_units
  if not is_probe then return shared_limit, free - units_reserved_for_probe(shared, now, lease_s) end
  if free < 1 then
    local waits_s = owner_timeout_s > 0 and math.min(owner_timeout_s, lease_s) or lease_s
    call('HSET', CONTROL, 'probe_waits', format_float(now + waits_s))
  end
  return shared_limit, free
end

if recorded then
  local record = cmsgpack.unpack(recorded)
  for number = 2, #record do
    local id = record[number]
    local state = load_leased(id, record[1] .. '-' .. id)
    if state and call('ZSCORE', LEASES, lease_name(id, state)) then add_lease(id, state, call('HGET', MEMBERS, id)) end
  end
else
  begin_writes()
  record_heartbeat(owner, now, owner_timeout_s)
  -- An owner that claims has a reachable gateway, so other owners need not wait for the answer to its probe.
  if not is_probe and shared.prober == owner then
    shared.probe, shared.prober = nil, nil
    call('HDEL', CONTROL, 'probe', 'prober')
  end
  local shared_limit, free = get_limit_and_room()
  local found, pending
  found, pending, blocked =
    select_first(max_count, max_bytes, room_by_lane, free, shared_limit, assumed_units, max_blocked)
  local record, members, states, leases, counted = {token_base}, {}, {}, {}, 0
  if pending > 0 then call('ZREMRANGEBYRANK', PENDING, 0, pending - 1) end
  local next_id, expires_at = (shared.next or 0) + 1, format_float(now + lease_s)
  for _, candidate in ipairs(found) do
    local id, state, member = candidate.id, nil, nil
    if id then
      call('ZREM', candidate.source, candidate.name)
      state, member = candidate.state, call('HGET', MEMBERS, id)
      if #member > max_member_bytes then -- the limit was higher before, or another queue had the request
        member = cut_member(member, max_member_bytes)
        call('HSET', MEMBERS, id, member)
      end
    else
      id, member, next_id = next_id, cut_member(candidate.name, max_member_bytes), next_id + 1
      state = {'', candidate.score, 0, 0, 0, 0, 0, '', '', candidate.tie_break}
      members[#members + 1], members[#members + 2] = id, member
    end
    state[LOCATION], state[DELIVERIES], state[MOVES] = 'L', state[DELIVERIES] + 1, state[MOVES] + 1
    state[TOKEN], state[OWNER] = token_base .. '-' .. id, owner
    set_units(state, candidate.units)
    counted = counted + candidate.units
    states[#states + 1], states[#states + 2] = id, cmsgpack.pack(state)
    leases[#leases + 1], leases[#leases + 2] = expires_at, lease_name(id, state)
    record[#record + 1] = id
    add_lease(id, state, member)
  end
  if #members > 0 then
    call('HSET', MEMBERS, unpack(members))
    call('HSET', CONTROL, 'next', next_id - 1)
  end
  if #found > 0 then
    call('HSET', ENTRIES, unpack(states))
    call('ZADD', LEASES, unpack(leases))
    add_owner_units(owner, counted, counted - #found)
    if is_probe then
      shared.probe, shared.prober = tostring(record[2]), owner
      call('HSET', CONTROL, 'probe', record[2], 'prober', owner)
      call('HDEL', CONTROL, 'probe_waits')
    end
  end
  call('SET', REPLY, cmsgpack.pack(record), 'EX', reply_s)
end
local waiting = call('ZCARD', PENDING) + call('ZCARD', RETURNED)
for number, lane in ipairs(LANES) do
  if room_by_lane[number] > 0 then waiting = waiting + call('ZCARD', lane.set) end
end
return {build_owner_reply(shared, now, owner, lease_s), waiting, lease_rows, blocked}
