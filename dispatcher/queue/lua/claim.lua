-- Lease the first requests of the queue to one owner.
-- KEYS   common keys…, the reply record of (owner, nonce)
-- ARGV   owner, owner_timeout_s, lease_s, max number of leases, max bytes, token base, reply_s, 1 for a probe or 0,
--        limit, read_at, lost, retry_after_max_s, units of the limit that no lease counts, bytes of the largest
--        member that is moved, units to assume for a request that was never leased, then the max number of leases of
--        each lane…
-- Returns {owner reply, number of waiting requests, {id, token, member, score, deliveries, attempts, refusals,
--         deaths, units, last attempt, …}}. A member of more than `bytes` is returned alone and as its length,
--         because it needs a call and a timeout of its own.
-- Guarantees: the units of all leases, and those that no lease counts, never pass the limit because of a claim. A
-- request is in exactly one place. The same nonce within reply_s claims nothing more. Only one probe runs at a time,
-- until its lease ends or its owner claims without probing. A probe that finds no room reserves the next unit that
-- becomes free, because the owners that use up the limit would claim it as well. The reservation ends when the
-- probing owner would count as dead.
local REPLY = KEYS[KEY_COUNT + 1]
local owner, timeout_s, lease_s = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local max_count, max_bytes, token_base, reply_s = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6], ARGV[7]
local is_probe, max_member_bytes, assumed_units = ARGV[8] == '1', tonumber(ARGV[14]), tonumber(ARGV[15])
local room_by_lane = {}
for lane = 1, #LANES do room_by_lane[lane] = tonumber(ARGV[15 + lane]) end
local now, shared = current_time(), load_control()
local lease_rows, recorded = {}, call('GET', REPLY)
correct_future_times(shared, now)

local function add_lease(id, state, member)
  if #member > max_bytes then member = #member end
  local at = #lease_rows
  lease_rows[at + 1], lease_rows[at + 2], lease_rows[at + 3], lease_rows[at + 4] =
    id, state[TOKEN], member, state[SCORE]
  lease_rows[at + 5], lease_rows[at + 6], lease_rows[at + 7] = state[DELIVERIES], state[ATTEMPTS], state[REFUSALS]
  lease_rows[at + 8], lease_rows[at + 9], lease_rows[at + 10] = state[DEATHS], get_units(state), state[REASON] or ''
  local lane = choose_lane(state)
  if lane then room_by_lane[lane] = room_by_lane[lane] - 1 end
end

-- Return the limit and the part of it that is free.
local function get_limit_and_room()
  if is_probe and shared.probe then return 0, 0 end
  local limit = share_and_get_limit(shared, now, ARGV[9], ARGV[10], ARGV[11], ARGV[12])
  if not limit then return 0, 0 end
  local free = limit - count_live_units(shared) - tonumber(ARGV[13])
  if not is_probe then return limit, free - units_reserved_for_probe(shared, now, lease_s) end
  if free < 1 then
    local waits_s = timeout_s > 0 and math.min(timeout_s, lease_s) or lease_s
    call('HSET', CONTROL, 'probe_waits', format_float(now + waits_s))
  end
  return limit, free
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
  record_heartbeat(owner, now, timeout_s)
  -- An owner that claims has a reachable gateway, so other owners need not wait for the answer to its probe.
  if not is_probe and shared.prober == owner then
    shared.probe, shared.prober = nil, nil
    call('HDEL', CONTROL, 'probe', 'prober')
  end
  local limit, free = get_limit_and_room()
  local found, pending = select_first(max_count, max_bytes, room_by_lane, free, limit, assumed_units)
  local record, members, states, leases, counted = {token_base}, {}, {}, {}, 0
  if pending > 0 then call('ZREMRANGEBYRANK', PENDING, 0, pending - 1) end
  local next_id, expires_at = (shared.next or 0) + 1, format_float(now + lease_s)
  for _, candidate in ipairs(found) do
    local id, state, member = candidate.id, nil, nil
    if id then
      call('ZREM', candidate.source, candidate.name)
      state, member = candidate.state, call('HGET', MEMBERS, id)
      if #member > max_member_bytes then -- stored by an older version, which had no limit
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
return {build_owner_reply(shared, now, owner, lease_s), waiting, lease_rows}
