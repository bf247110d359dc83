-- Definitions that every script of a queue shares. KEYS begins with the keys of the queue and of its pool.
-- Uses: time
--
-- Python puts these locals in front of this text (redis/lua_scripts.py): the keys by name (PENDING …) and the expected
-- KEY_TYPES. It replaces these names by their values: the number of the keys before those of features
-- (KERNEL_KEY_COUNT), FEATURES, and the constants of constants.py.
--
-- An entry is a request that was claimed at least once. ENTRIES has its state by its id, as one packed array with
-- these indexes:
local LOCATION, SCORE, DELIVERIES, ATTEMPTS, REFUSALS = 1, 2, 3, 4, 5
local DEATHS, MOVES, TOKEN, OWNER, MEMBER_PREFIX = 6, 7, 8, 9, 10
local REASON, DIED_AT, UNITS = 11, 12, 13
-- LOCATION is the letter of the set that has the entry: 'L'eases, 'R'eturned, 'D'elayed, dead ('X'), or that of a
-- lane. SCORE stays the text that Redis returned, so that no digit is lost. MEMBER_PREFIX is the beginning of the
-- member; it orders entries with equal scores. REASON is why a dead request died; before that, it is the outcome of
-- the last failed attempt. UNITS is the number of units that the request needs, as far as it is known, and that its
-- lease counts (1 if it is missing). A feature declares the index of what it stores with an entry.

-- The features of this program that store something in the queue (queue/lua_files.py), in the order of their indexes,
-- and by name. Each is a table with .name, .first_key and .last_key, perhaps .lane, and the functions that it offers
-- (hooks). Its files define them: the main file in every script, and files with `-- Hooks` in the scripts that they
-- name. A queue may have data of a feature if .is_used is true; nil if that was not asked yet. Hooks:
--   .has_data()                whether the queue has data of a feature without `-- Control`
--   .count()                   what the feature counts (count_requests.lua)
--   .waits_for(state)          the name of what an entry waits for
--   .blob_bytes(state), .read_blob(id)  the length of a large value that the feature keeps of an entry, and the value
--   .deleted(items)            entries are deleted. Items have .id, and .state if it is known
--   .before_writes(items)      the only hook that may raise, for it is called before the first write of a script. The
--                              items have .state, if their request is an entry
--   .released(item, state)     a lease ends without a result
--   .take_place(item, state, offer)  put a released entry into its place, or keep it to be claimed again in this step.
--                              Returns whether it did so
--   .claim_more(offer, shared, now)  lease requests to the owner of an offer (claim_again.lua). Returns its reply with
--                              .count, the number of leases
--   .keep(id, state)           a dead request enters the queue again. Returns a function that stores with its new id
--                              and state what the feature has of it
--   .refresh(item)             the state of an entry is about to be used, which an earlier item may have changed
--   .removed(id, state)        an entry leaves the queue
--   .ended(item, now)          a request has ended. An item without .state was never claimed
--   .flush(now)                the script ends, and writes what the feature has collected
--   .swept(now, foreign)       each sweep. Returns a number for its reply, and whether there is more to do
--   .timed_key                 a sorted set by time, which moves back with the clock
local features = FEATURES
for _, feature in ipairs(features) do
  features[feature.name] = feature
  if feature.lane then feature.lane.of = feature end
  feature.field = feature.control and feature.control .. ':' .. PENDING
end

-- Call a hook of all features that have it.
function features.call(name, ...)
  for _, feature in ipairs(features) do
    if feature[name] then feature[name](...) end
  end
end

-- Return the first result of a hook that is neither nil nor false.
function features.ask(name, ...)
  for _, feature in ipairs(features) do
    local result = feature[name] and feature[name](...)
    if result then return result end
  end
end

-- A lane (requests/lanes.py) has entries that wait apart from all others, because a claim may lease only a
-- limited number of each lane. An entry waits in the first lane whose `contains` is true of its state. Closed lanes come
-- first, from which no claim takes an entry. Entries of a lane with `goes_first` go before all others of their
-- priority.
local LANES = {}
local function add_lanes(closed)
  for _, feature in ipairs(features) do
    if feature.lane and feature.lane.closed == closed then LANES[#LANES + 1] = feature.lane end
  end
end
add_lanes(true)
LANES[#LANES + 1] =
  {set = SUSPECTS, letter = 'S', contains = function(state) return state[DEATHS] >= SUSPECT_DEATHS end}
add_lanes(false)

-- Return whether a claim has to read a lane. `load_control` has found out which features may have data.
local function is_open(lane) return not lane.closed and (not lane.of or not lane.of.field or lane.of.is_used) end

local function choose_lane(state)
  for number, lane in ipairs(LANES) do
    if lane.contains(state) then return number end
  end
end

-- The sets in which requests wait for a claim, with their letters: pending ('P'; these requests have no entry yet),
-- returned, and the lanes.
local WAITING_SETS, WAITING_LETTERS = {PENDING, RETURNED}, {'P', 'R'}
for number, lane in ipairs(LANES) do
  WAITING_SETS[2 + number], WAITING_LETTERS[2 + number] = lane.set, lane.letter
end

-- Raise WRONGKEY if another program has stored a value of another type under one of these keys. Scripts call this
-- before their first write, because an error in the middle of a script would leave its writes half done. Return
-- whether any of the keys exists.
local function check_types(first, last)
  local exists = false
  for number = first, last do
    local kind = call('TYPE', KEYS[number]).ok
    if kind ~= 'none' and kind ~= KEY_TYPES[number] then
      error({err = 'WRONGKEY ' .. KEYS[number] .. ' holds a ' .. kind .. ', not a ' .. KEY_TYPES[number]})
    end
    exists = exists or kind ~= 'none'
  end
  return exists
end
check_types(1, KERNEL_KEY_COUNT)
function features.check_types(feature)
  if feature.exists == nil then feature.exists = check_types(feature.first_key, feature.last_key) end
  return feature.exists
end

-- The field of CONTROL that has the names of the features that stored something in this queue. A feature calls
-- `features.record_stored` when it does so, and each sweep corrects the field.
features.stored_field = 'features:' .. PENDING
function features.record_stored(feature)
  if feature.is_recorded then return end
  feature.is_recorded = true
  local names = call('HGET', CONTROL, features.stored_field) or ''
  for name in string.gmatch(names, '%S+') do
    if name == feature.name then return end
  end
  call('HSET', CONTROL, features.stored_field, names == '' and feature.name or names .. ' ' .. feature.name)
end

-- Read which features may have data, together with a field of CONTROL, which is returned. For scripts without
-- `load_control`.
function features.load_used(field)
  local fields, number = {field}, 1
  for _, feature in ipairs(features) do fields[#fields + 1] = feature.field end
  local values = call('HMGET', CONTROL, unpack(fields))
  for _, feature in ipairs(features) do
    if feature.field then
      number = number + 1
      feature.is_used = values[number] and true or false
    end
  end
  return values[1]
end

-- Check the types of the keys of features that may have data. A feature calls this before the first write of a script
-- that may return any entry to the queue.
function features.check_used()
  for _, feature in ipairs(features) do
    if feature.field and feature.is_used == nil then
      feature.is_used = call('HGET', CONTROL, feature.field) and true or false
    end
    if feature.field and feature.is_used then features.check_types(feature) end
  end
end

local function parse_score(score)
  if score == 'inf' then return math.huge elseif score == '-inf' then return -math.huge end
  return tonumber(score)
end

-- Make a write that changes nothing. Redis refuses a script for lack of memory (and on a replica, or without a disk)
-- only at its first write, and for lack of memory only if that write can grow. After this removal of nothing, Redis
-- takes all writes of the script or none, and a queue in a full Redis can still be worked off.
local function begin_writes() call('HDEL', CONTROL, '') end

-- Run a command with arguments in pairs that may be too many for one call.
local function run_in_batches(command, key, args)
  for at = 1, #args, 1000 do call(command, key, unpack(args, at, math.min(at + 999, #args))) end
end

-- Record that the owner is alive until `now + timeout_s`. With a timeout of 0, the owner sends no heartbeats, and
-- only its leases run out.
local function record_heartbeat(owner, now, timeout_s)
  if timeout_s > 0 then call('ZADD', HEARTBEATS, format_float(now + timeout_s), owner) end
end

local function load_entry(id)
  local packed = call('HGET', ENTRIES, id)
  return packed and cmsgpack.unpack(packed)
end

local function save_entry(id, state) call('HSET', ENTRIES, id, cmsgpack.pack(state)) end

-- Return the state of an entry, or nil if this token does not hold its lease.
local function load_leased(id, token)
  local state = load_entry(id)
  if state and state[LOCATION] == 'L' and state[TOKEN] == token then return state end
  return nil
end

-- Return the large value that a feature keeps of an entry, the blob. If it has more than
-- `max_bytes` together with the member, its length is returned, because it needs a call and a timeout of its own.
local function get_blob_bytes(state) return features.ask('blob_bytes', state) or 0 end
local function load_blob(id, state, member_bytes, max_bytes)
  local blob_bytes = get_blob_bytes(state)
  if blob_bytes == 0 then return '' end
  if member_bytes + blob_bytes > max_bytes then return blob_bytes end
  return features.ask('read_blob', id) or ''
end

-- Append a leased request to the rows of a reply, from which redis/steps/common.py makes a lease.
local function add_lease_row(rows, id, state, member, blob)
  local at = #rows
  rows[at + 1], rows[at + 2], rows[at + 3], rows[at + 4] = id, state[TOKEN], member, state[SCORE]
  rows[at + 5], rows[at + 6], rows[at + 7] = state[DELIVERIES], state[ATTEMPTS], state[REFUSALS]
  rows[at + 8], rows[at + 9], rows[at + 10] = state[DEATHS], state[UNITS] or 1, state[REASON] or ''
  rows[at + 11] = blob
end

local function ordered_name(id, state) return state[MEMBER_PREFIX] .. '\0' .. string.format('%016d', id) end

local function get_units(state) return state[UNITS] or 1 end

-- Set the number of units that an entry needs. The array must have no holes, because MessagePack needs twice the
-- space for one with holes.
local function set_units(state, units)
  if units == get_units(state) then return end
  state[REASON], state[DIED_AT], state[UNITS] = state[REASON] or '', state[DIED_AT] or '', units
end

-- Set the value of a feature in the state of an entry. The array must have no holes (see `set_units`).
local function set_extra(state, index, value)
  state[REASON], state[DIED_AT], state[UNITS] = state[REASON] or '', state[DIED_AT] or '', get_units(state)
  for at = UNITS + 1, index - 1 do state[at] = state[at] or false end
  state[index] = value
end

-- Remove the value of a feature from the state of an entry.
local function clear_extra(state, index)
  state[index] = nil
  for at = index + 1, LAST_EXTRA do
    if state[at] ~= nil then state[index] = false end
  end
end

-- Return the name of a lease. It contains the number of units unless that is 1, because scripts of other queues of
-- the pool read the name and do not have the entry. No units are written with two digits ('*00'), because '*0' is the
-- name of an abandoned lease.
local function lease_name(id, state)
  local units = get_units(state)
  return id .. (units == 1 and ':' or units == 0 and '*00:' or '*' .. units .. ':') .. state[OWNER]
end

-- Return the name of an abandoned lease: it ran out, and no dispatcher sweeps its queue any more. It counts nothing.
-- The next sweep of its queue returns its request to the queue (sweep.lua).
local function abandoned_lease_name(id, owner) return id .. '*0:' .. owner end

-- Return the units of all live leases of the pool. The field `extra_units` has the units beyond one for each lease.
local added_extra_units = 0
local function count_live_units(shared) return call('ZCARD', LEASES) + (shared.extra_units or 0) + added_extra_units end

-- Add units to those that an owner holds (or subtract them). `extra` is their part beyond one for each lease.
local function add_owner_units(owner, units, extra)
  if extra ~= 0 then
    call('HINCRBY', CONTROL, 'extra_units', extra)
    added_extra_units = added_extra_units + extra
  end
  if units == 0 then return end -- it may be a negative zero, which Redis does not accept as a number
  if call('HINCRBY', OWNERS, owner, units) <= 0 then call('HDEL', OWNERS, owner) end
end

-- Return an entry to its place in the queue.
local function return_to_queue(id, state)
  local at = 2 + (choose_lane(state) or 0)
  state[LOCATION] = WAITING_LETTERS[at]
  state[MOVES] = state[MOVES] + 1
  call('ZADD', WAITING_SETS[at], state[SCORE], ordered_name(id, state))
  save_entry(id, state)
end

-- End the leases of `items`, a few thousand at most, because all of them are arguments of one command. Each item has
-- .id and .state, and may have .name, the id as text (which is faster). Sets .counted of each item to the units of
-- its lease.
local function end_leases(items, probe)
  if #items == 0 then return end
  local names, counts, leases = {}, {}, {}
  for number, item in ipairs(items) do names[number] = lease_name(item.name or item.id, item.state) end
  -- If some leases were not found under these names, they are abandoned, and each is removed under its other name.
  local all_counted = call('ZREM', LEASES, unpack(names)) == #names
  for _, item in ipairs(items) do
    local state, owner = item.state, item.state[OWNER]
    local counted = all_counted or call('ZREM', LEASES, abandoned_lease_name(item.id, owner)) == 0
    item.counted = counted and get_units(state) or 0
    counts[owner], leases[owner] = (counts[owner] or 0) + item.counted, (leases[owner] or 0) + 1
    if probe and tostring(item.id) == probe then call('HDEL', CONTROL, 'probe', 'prober') end
    state[TOKEN], state[OWNER] = '', ''
    -- A request that shares a call has 0 units while another lease counts for it. That ends with the lease.
    if get_units(state) == 0 then set_units(state, 1) end
  end
  for owner, units in pairs(counts) do add_owner_units(owner, -units, leases[owner] - units) end
end

-- Return a member that is not longer than `largest`. A longer one is replaced by its beginning and its length
-- (requests/oversize.py), so that it is never moved as a whole.
local function cut_member(member, largest)
  if #member <= largest then return member end
  return string.sub(member, 1, KEPT_BYTES) .. '\0cut:' .. string.format('%.0f', #member)
end

-- Delete all that is stored of these entries. The items have .id, and .state if it is known.
local function delete_entries(items)
  if #items == 0 then return end
  local ids = {}
  for number, item in ipairs(items) do ids[number] = item.id end
  call('HDEL', ENTRIES, unpack(ids))
  call('HDEL', MEMBERS, unpack(ids))
  features.call('deleted', items)
end

local CONTROL_FIELDS = {
  'next', 'limit', 'read_at', 'limit_lost', 'overload_at', 'overload_until', 'overload_capacity', 'overload_in_flight',
  'probe', 'prober', 'lost', 'orphaned', 'tick', 'quiet_until', 'heartbeats_quiet_until',
  'probe_waits', 'extra_units', features.stored_field,
}
for _, feature in ipairs(features) do CONTROL_FIELDS[#CONTROL_FIELDS + 1] = feature.field end
-- Load the state that the owners share, and which features may have data.
local function load_control()
  local values = call('HMGET', CONTROL, unpack(CONTROL_FIELDS))
  local control = {}
  for number, name in ipairs(CONTROL_FIELDS) do
    local value = values[number]
    if value then
      control[name] = (name == 'probe' or name == 'prober' or name == features.stored_field) and value or tonumber(value)
    end
  end
  control.lost, control.orphaned = control.lost or 0, control.orphaned or 0
  for _, feature in ipairs(features) do
    if feature.field then feature.is_used = control[feature.field] and features.check_types(feature) or false end
  end
  return control
end

-- Raise an error if the queue has data of a feature that this program does not have. It would run the requests of
-- that feature wrongly.
function features.require_stored(control)
  for name in string.gmatch(control[features.stored_field] or '', '%S+') do
    if not features[name] then error({err = 'NOFEATURE ' .. PENDING .. ' has requests of the feature ' .. name}) end
  end
end

-- Correct times in the future. The clock of the server steps back at a failover to a host whose clock is behind. The
-- newest reading and the newest refusal count as of now from then on. Otherwise, no reading would be newer and no
-- refusal would end for as long as the clock is behind. The limit algorithm learns nothing from the corrected
-- refusal, because its capacity flag is cleared.
local function correct_future_times(shared, now)
  if shared.read_at and shared.read_at > now + CLOCK_STEP_S then
    begin_writes()
    shared.read_at = now
    call('HSET', CONTROL, 'read_at', format_float(now))
  end
  if shared.overload_at and shared.overload_at > now + CLOCK_STEP_S then
    begin_writes()
    shared.overload_until = now + math.max(0, shared.overload_until - shared.overload_at)
    shared.overload_at, shared.overload_capacity = now, 0
    call('HSET', CONTROL, 'overload_at', format_float(now), 'overload_until', format_float(shared.overload_until),
         'overload_capacity', 0)
  end
end

-- Return the time of a reading that an owner sent. A time in the future is from before a step of the clock, so its
-- age is unknown: it counts as older than any other.
local function effective_read_at(read_at, now) return read_at > now + CLOCK_STEP_S and 0 or read_at end

-- Make the limit of this permit the shared limit, unless the shared reading is newer.
local function update_shared_limit(shared, limit, read_at, lost)
  if shared.read_at and read_at < shared.read_at - SAME_READING_S then return end
  local newest = math.max(read_at, shared.read_at or read_at)
  if shared.limit == limit and shared.read_at == newest and shared.limit_lost == lost then return end
  shared.limit, shared.read_at, shared.limit_lost = limit, newest, lost
  call('HSET', CONTROL, 'limit', limit, 'read_at', format_float(newest), 'limit_lost', lost)
end

-- Return the time until which the gateway asked to wait, but at most `max_wait_s` after the refusal. Another owner
-- may have stored a longer wait, because it has another `retry.max_s`.
local function bounded_retry_at(shared, max_wait_s)
  return math.min(shared.overload_until, shared.overload_at + max_wait_s)
end

-- Share the limit of an owner, and return the limit in units for leases of the owner. Return nil while the queue
-- is paused, and while the newest refusal asks to wait or is not older than the reading.
local function share_and_get_limit(shared, now, limit, read_at, lost, max_wait_s)
  if call('EXISTS', PAUSED) == 1 then return nil end
  read_at = effective_read_at(read_at, now)
  update_shared_limit(shared, limit, read_at, lost)
  if shared.overload_at and (now < bounded_retry_at(shared, max_wait_s) or read_at <= shared.overload_at) then
    return nil
  end
  -- Units that were lost since a limit was computed may still run, so they lower it.
  return math.min(limit - (shared.lost - lost), shared.limit - (shared.lost - shared.limit_lost))
end

-- Build the part of the reply that all scripts of owners have in common: counts of leases in units, and the state
-- that the owners share. A lease counts until it is ended by name, reclaimed or abandoned, even if its time has run
-- out. Otherwise, a claim could pass the limit while requests of late owners still run.
local function build_owner_reply(shared, now, owner, lease_s)
  local just_leased_units = 0
  for _, name in ipairs(call('ZRANGEBYSCORE', LEASES, format_float(now + lease_s - JUST_LEASED_S), '+inf')) do
    if string.match(name, ':(.*)$') ~= owner then
      just_leased_units = just_leased_units + (tonumber(string.match(name, '^%d+%*(%d+):')) or 1)
    end
  end
  return {
    format_float(now), count_live_units(shared), tonumber(call('HGET', OWNERS, owner) or 0), just_leased_units,
    shared.lost, shared.orphaned,
    shared.limit or false, format_float(shared.read_at or 0),
    shared.overload_at and format_float(shared.overload_at) or false, format_float(shared.overload_until or 0),
    shared.overload_capacity or 0, shared.overload_in_flight or 0,
    shared.prober or false, call('EXISTS', PAUSED),
  }
end
