-- What every script shares. Each gets the keys of a line and of its pool first, its own. Their names (PENDING …), how
-- many they are (OWN, of which OFTEN are used by whatever script, and those behind OF_MODELS for what waits for its
-- model), their TYPES, and the numbers that stand in capitals come before this, from keys.py and constants.py.
--
-- An entry is a request that was claimed at least once. Its state is one packed array under its id:
local WHERE, SCORE, DELIVERIES, ATTEMPTS, REFUSALS = 1, 2, 3, 4, 5
local DEATHS, MOVES, TOKEN, OWNER, PREFIX, REASON, DIED, UNITS, TURN, AWAITS = 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
-- WHERE is the set that holds it: 'L'eases, 'R'eturned, that of a lane, 'D'elayed, dead ('X'). SCORE stays the
-- text that Redis gave, so that no digit is lost. PREFIX is the head of its member, for the order of ties. REASON is why
-- it died, and before that what the last try that counted came to. UNITS is what it weighs, as far as that is known, and
-- what its lease counts; where it is not there, 1. TURN is its seat in a sequence (sequences.lua), there as long as the
-- sequence knows it. AWAITS is what it waits for in the lane of those whose model is not served (models.lua), there as
-- long as it lies in that lane.
local IN_LINE = 1 -- of a seat: it waits for its turn

-- Lanes (core/requests/lanes.py): entries that wait apart, for a claim may lease only so many of each. In the order of their rooms
-- in a claim. An entry waits in the first whose `holds` is true of its state. Of a closed one no claim takes any.
local function in_line(state) return state[TURN] and state[TURN][IN_LINE] == 1 end
local LANES = {
  {set = SUSPECTS, letter = 'S', holds = function(state)
    return not in_line(state) and not state[AWAITS] and state[DEATHS] >= SUSPECT_DEATHS
  end},
  {set = SEQUENCED, letter = 'Q', holds = in_line, closed = true},
  {set = ABSENT, letter = 'A', holds = function(state) return not in_line(state) and state[AWAITS] end, closed = true},
}

local function lane_of(state)
  for number, lane in ipairs(LANES) do
    if lane.holds(state) then return number end
  end
end

-- Where a request waits for a claim, each with its WHERE: pending ('P', no entry yet), returned, and the lanes. Outside
-- of the scripts a lane is named by its number (redis/search.py).
local WAITING, WAITING_LETTERS, WAITING_NAMES = {PENDING, RETURNED}, {'P', 'R'}, {'P', 'R'}
for number, lane in ipairs(LANES) do
  WAITING[2 + number], WAITING_LETTERS[2 + number], WAITING_NAMES[2 + number] = lane.set, lane.letter, tostring(number)
end

-- A foreign key under one of our names would fail a script half way: look before the first write.
local function check_types(first, last)
  for number = first, last do
    local found = call('TYPE', KEYS[number]).ok
    if found ~= 'none' and found ~= TYPES[number] then
      error({err = 'WRONGKEY ' .. KEYS[number] .. ' holds a ' .. found .. ', not a ' .. TYPES[number]})
    end
  end
end
check_types(1, OFTEN)

local function number_of(score)
  if score == 'inf' then return math.huge elseif score == '-inf' then return -math.huge end
  return tonumber(score)
end

-- Redis refuses a script for want of memory (or on a replica, or without disk) only at its first write, and
-- for memory only if that can grow. So the first write is a removal of nothing: what comes after is whole or
-- not at all, and a full Redis can still be worked empty.
local function open() call('HDEL', CONTROL, '') end

-- An owner shows that it lives, until so long from now. 0: it does not, and only its leases run out.
local function beat(me, now, timeout_s)
  if timeout_s > 0 then call('ZADD', BEATS, text(now + timeout_s), me) end
end

local function load(id)
  local packed = call('HGET', ENTRIES, id)
  return packed and cmsgpack.unpack(packed)
end

local function save(id, state) call('HSET', ENTRIES, id, cmsgpack.pack(state)) end

-- The state of an entry, if this token holds its lease.
local function held(id, token)
  local state = load(id)
  if state and state[WHERE] == 'L' and state[TOKEN] == token then return state end
  return nil
end

local function name_in_order(id, state) return state[PREFIX] .. '\0' .. string.format('%016d', id) end

local function units_of(state) return state[UNITS] or 1 end

-- What an entry weighs from now on. (An array without holes, which MessagePack takes half the room for.)
local function weigh(state, units)
  if units == units_of(state) then return end
  state[REASON], state[DIED], state[UNITS] = state[REASON] or '', state[DIED] or '', units
end

-- The seat of an entry, or false: none any more.
local function seat(state, turn)
  if not turn and not state[TURN] then return end
  state[REASON], state[DIED], state[UNITS] = state[REASON] or '', state[DIED] or '', units_of(state)
  state[TURN] = turn
end

-- What a lease counts stands in its name where it is not 1, for whoever looks at it may not know its line. Nothing is
-- written with two digits: one is an abandoned lease.
local function lease_name(id, state)
  local units = units_of(state)
  return id .. (units == 1 and ':' or units == 0 and '*00:' or '*' .. units .. ':') .. state[OWNER]
end

-- A lease that nobody took back when it ran out, for nobody sweeps its line, goes on under this name: it counts nothing,
-- and that line's next sweep takes its request back (sweep.lua).
local function abandoned_name(id, owner) return id .. '*0:' .. owner end

-- Live leases in units. `more`: those that leases count beyond one each, of all lines.
local more_since = 0
local function live_units(shared) return call('ZCARD', LEASES) + (shared.more or 0) + more_since end

-- So many units are held more by this owner (or less), of which `more` beyond one for each lease.
local function hold(owner, units, more)
  if more ~= 0 then
    call('HINCRBY', CONTROL, 'more', more)
    more_since = more_since + more
  end
  if units == 0 then return end -- it may be a negative zero, which Redis takes for no number
  if call('HINCRBY', OWNERS, owner, units) <= 0 then call('HDEL', OWNERS, owner) end
end

-- Back to its place in the order.
local function give_back(id, state)
  local at = 2 + (lane_of(state) or 0)
  state[WHERE] = WAITING_LETTERS[at]
  state[MOVES] = state[MOVES] + 1
  call('ZADD', WAITING[at], state[SCORE], name_in_order(id, state))
  save(id, state)
end

-- End the leases of `items` (.id, .state, and .name: the id as text, which is quicker, where that is there), at most a few
-- thousand: what a script may name in one command. Each gets .counted: the units of its lease.
local function end_leases(items, probe)
  if #items == 0 then return end
  local names, counts, leases = {}, {}, {}
  for number, item in ipairs(items) do names[number] = lease_name(item.name or item.id, item.state) end
  local all_counted = call('ZREM', LEASES, unpack(names)) == #names
  for _, item in ipairs(items) do
    local state, owner = item.state, item.state[OWNER]
    local counted = all_counted or call('ZREM', LEASES, abandoned_name(item.id, owner)) == 0
    item.counted = counted and units_of(state) or 0
    counts[owner], leases[owner] = (counts[owner] or 0) + item.counted, (leases[owner] or 0) + 1
    if probe and tostring(item.id) == probe then call('HDEL', CONTROL, 'probe', 'prober') end
    state[TOKEN], state[OWNER] = '', ''
    if units_of(state) == 0 then weigh(state, 1) end -- nobody counts for it any more
  end
  for owner, units in pairs(counts) do hold(owner, -units, leases[owner] - units) end
end

-- A member that is longer than any may be moves no further: its head is kept, and how long it was (core/requests/oversize.py).
local function shortened(member, largest)
  if #member <= largest then return member end
  return string.sub(member, 1, HEAD_BYTES) .. '\0cut:' .. string.format('%.0f', #member)
end

-- Forget entries whole.
local function forget(ids)
  if #ids == 0 then return end
  call('HDEL', ENTRIES, unpack(ids))
  call('HDEL', MEMBERS, unpack(ids))
end

local FIELDS = {'next', 'limit', 'read_at', 'limit_lost', 'overload_at', 'overload_until', 'overload_capacity',
                'overload_in_flight', 'probe', 'prober', 'lost', 'stray', 'tick', 'quiet_until',
                'beats_tick', 'beats_quiet_until', 'probe_waits', 'more'}
local function control()
  local values = call('HMGET', CONTROL, unpack(FIELDS))
  local found = {}
  for number, name in ipairs(FIELDS) do
    local value = values[number]
    if value then found[name] = (name == 'probe' or name == 'prober') and value or tonumber(value) end
  end
  found.lost, found.stray = found.lost or 0, found.stray or 0
  return found
end

-- The server's clock may step back: a failover to a host whose clock is behind. What was stored of later than now is
-- of now from then on: no reading would be newer else, and no refusal over, for as long as the step. Owners take a
-- refusal of another time for another one: it teaches nothing again.
local function rewind(shared, now)
  if shared.read_at and shared.read_at > now + AHEAD_S then
    open()
    shared.read_at = now
    call('HSET', CONTROL, 'read_at', text(now))
  end
  if shared.overload_at and shared.overload_at > now + AHEAD_S then
    open()
    shared.overload_until = now + math.max(0, shared.overload_until - shared.overload_at)
    shared.overload_at, shared.overload_capacity = now, 0
    call('HSET', CONTROL, 'overload_at', text(now), 'overload_until', text(shared.overload_until),
         'overload_capacity', 0)
  end
end

-- When a reading was taken, as an owner says. By a clock of before such a step nobody knows: it is older than any.
local function read_time(said, now)
  local at = tonumber(said)
  return at > now + AHEAD_S and 0 or at
end

-- Take a permit for the shared one if its reading is no older.
local function adopt(shared, limit, read_at, lost)
  if shared.read_at and read_at < shared.read_at - SAME_READING_S then return end
  local newest = math.max(read_at, shared.read_at or read_at)
  if shared.limit == limit and shared.read_at == newest and shared.limit_lost == lost then return end
  shared.limit, shared.read_at, shared.limit_lost = limit, newest, lost
  call('HSET', CONTROL, 'limit', limit, 'read_at', text(newest), 'limit_lost', lost)
end

-- Until when the gateway asked to wait. Owners with another retry.max_s, or of versions that cut nothing, may have
-- stored more than this one keeps to.
local function wait_until(shared, most_s) return math.min(shared.overload_until, shared.overload_at + most_s) end

-- The limit by which an owner may lease, in units, if it shares this permit: limit, read_at, lost, retry_after_max_s.
-- None while paused, and while the newest refusal is waited for or no older than its reading.
local function limit_by(shared, now, limit, read_at, lost, most_s)
  if call('EXISTS', PAUSED) == 1 then return nil end
  limit, read_at, lost = tonumber(limit), read_time(read_at, now), tonumber(lost)
  adopt(shared, limit, read_at, lost)
  if shared.overload_at and (now < wait_until(shared, tonumber(most_s)) or read_at <= shared.overload_at) then
    return nil
  end
  return math.min(limit - (shared.lost - lost), shared.limit - (shared.lost - shared.limit_lost))
end

-- What every owner's call tells: the counts of leases, in units, and what owners share. A lease is live until it
-- is ended by name, reclaimed or abandoned, however long its time has run out, so that no claim ever passes the limit.
local function facts(shared, now, me, lease_s)
  local young = 0
  for _, name in ipairs(call('ZRANGEBYSCORE', LEASES, text(now + lease_s - YOUNG_S), '+inf')) do
    if string.match(name, ':(.*)$') ~= me then
      young = young + (tonumber(string.match(name, '^%d+%*(%d+):')) or 1)
    end
  end
  return {
    text(now), live_units(shared), tonumber(call('HGET', OWNERS, me) or 0), young, shared.lost, shared.stray,
    shared.limit or false, text(shared.read_at or 0),
    shared.overload_at and text(shared.overload_at) or false, text(shared.overload_until or 0),
    shared.overload_capacity or 0, shared.overload_in_flight or 0,
    shared.prober or false, call('EXISTS', PAUSED),
  }
end
