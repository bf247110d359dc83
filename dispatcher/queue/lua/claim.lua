-- Lease the first requests in line to one owner.
-- KEYS   own…, the reply record of (owner, nonce)
-- ARGV   owner, owner_timeout_s, lease_s, most, bytes, token base, reply_s, 1: to probe with, or 0, limit, read_at,
--        lost, retry_after_max_s, units of the limit that no lease counts, the bytes of the largest member that is moved, the units that a request is taken
--        to weigh that never was leased, then how many may be leased of each lane…
-- Returns {facts, waiting, {id, token, member, score, deliveries, attempts, refusals, deaths, units, last try, …}}; in place of
--        a member of more than `bytes`, which is the only one then, how many it has: it wants a call, and time, of its own
-- Keeps: the units of all leases, and those that none counts, never pass the limit because of a claim; a request is in one place; the same nonce within
-- reply_s claims nothing more. Only one probe runs at a time: until its lease ends, or its owner claims otherwise.
-- A probe that finds the limit used up reserves the next unit that comes free, or the owners that use it up would claim
-- that as well; the reservation ends when the prober would be taken for dead.
local REPLY = KEYS[OWN + 1]
local me, timeout_s, lease_s = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local most, bytes, base, reply_s = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6], ARGV[7]
local probing, largest, units = ARGV[8] == '1', tonumber(ARGV[14]), tonumber(ARGV[15])
local rooms = {}
for lane = 1, #LANES do rooms[lane] = tonumber(ARGV[15 + lane]) end
local now, shared = clock(), control()
local leased, known = {}, call('GET', REPLY)
rewind(shared, now)

local function tell(id, state, member)
  if #member > bytes then member = #member end
  local at = #leased
  leased[at + 1], leased[at + 2], leased[at + 3], leased[at + 4] = id, state[TOKEN], member, state[SCORE]
  leased[at + 5], leased[at + 6], leased[at + 7] = state[DELIVERIES], state[ATTEMPTS], state[REFUSALS]
  leased[at + 8], leased[at + 9], leased[at + 10] = state[DEATHS], units_of(state), state[REASON] or ''
  local lane = lane_of(state)
  if lane then rooms[lane] = rooms[lane] - 1 end
end

-- The limit, and what of it is free.
local function room()
  if probing and shared.probe then return 0, 0 end
  local limit = limit_by(shared, now, ARGV[9], ARGV[10], ARGV[11], ARGV[12])
  if not limit then return 0, 0 end
  local free = limit - live_units(shared) - tonumber(ARGV[13])
  if not probing then return limit, free - kept_for_probe(shared, now, lease_s) end
  if free < 1 then
    local waits_s = timeout_s > 0 and math.min(timeout_s, lease_s) or lease_s
    call('HSET', CONTROL, 'probe_waits', text(now + waits_s))
  end
  return limit, free
end

if known then
  local record = cmsgpack.unpack(known)
  for number = 2, #record do
    local id = record[number]
    local state = held(id, record[1] .. '-' .. id)
    if state and call('ZSCORE', LEASES, lease_name(id, state)) then tell(id, state, call('HGET', MEMBERS, id)) end
  end
else
  open()
  beat(me, now, timeout_s)
  if not probing and shared.prober == me then -- who claims has a gateway: others need not wait for the answer
    shared.probe, shared.prober = nil, nil
    call('HDEL', CONTROL, 'probe', 'prober')
  end
  local limit, free = room()
  local found, pending = first(most, bytes, rooms, free, limit, units)
  local record, members, states, leases, counted = {base}, {}, {}, {}, 0
  if pending > 0 then call('ZREMRANGEBYRANK', PENDING, 0, pending - 1) end
  local fresh, ends = (shared.next or 0) + 1, text(now + lease_s)
  for _, one in ipairs(found) do
    local id, state, member = one.id, nil, nil
    if id then
      call('ZREM', one.source, one.name)
      state, member = one.state, call('HGET', MEMBERS, id)
      if #member > largest then -- put there by a version that knew no largest
        member = shortened(member, largest)
        call('HSET', MEMBERS, id, member)
      end
    else
      id, member, fresh = fresh, shortened(one.name, largest), fresh + 1
      state = {'', one.score, 0, 0, 0, 0, 0, '', '', one.tie}
      members[#members + 1], members[#members + 2] = id, member
    end
    state[WHERE], state[DELIVERIES], state[MOVES] = 'L', state[DELIVERIES] + 1, state[MOVES] + 1
    state[TOKEN], state[OWNER] = base .. '-' .. id, me
    weigh(state, one.weighs)
    counted = counted + one.weighs
    states[#states + 1], states[#states + 2] = id, cmsgpack.pack(state)
    leases[#leases + 1], leases[#leases + 2] = ends, lease_name(id, state)
    record[#record + 1] = id
    tell(id, state, member)
  end
  if #members > 0 then
    call('HSET', MEMBERS, unpack(members))
    call('HSET', CONTROL, 'next', fresh - 1)
  end
  if #found > 0 then
    call('HSET', ENTRIES, unpack(states))
    call('ZADD', LEASES, unpack(leases))
    hold(me, counted, counted - #found)
    if probing then
      shared.probe, shared.prober = tostring(record[2]), me
      call('HSET', CONTROL, 'probe', record[2], 'prober', me)
      call('HDEL', CONTROL, 'probe_waits')
    end
  end
  call('SET', REPLY, cmsgpack.pack(record), 'EX', reply_s)
end
local waiting = call('ZCARD', PENDING) + call('ZCARD', RETURNED)
for number, lane in ipairs(LANES) do
  if rooms[number] > 0 then waiting = waiting + call('ZCARD', lane.set) end
end
return {facts(shared, now, me, lease_s), waiting, leased}
