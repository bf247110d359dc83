-- Sequences: requests with one sequence id run in order, one at a time. features/sequences/README.md has the rules. A run
-- of a sequence lasts from its begin to its end; a slot is the place of a request in a run; the next request is the one
-- whose turn it is.
-- Uses: common, byte_order
--
-- SEQUENCES   the record of each sequence by its id (packed, see `unpack_sequence`); under '', what all sequences share
-- RUN_QUEUES  the queues of all runs, in the order of bytes. A waiting slot is '<run>:<index>:<entry>', 16 digits
--             each. An index whose request ended before its turn is '<run>:<index>:-<last><failed><on error>:<cause>'.
-- SEQUENCED   the lane in which slots wait, by score
-- PARKED      the sequences that may not begin yet (`parked_name`): by override, then by their lowest score
-- CLOSED_RUNS  '<run>:<code>:<why>' by run: the remaining requests of a closed run, which are to be answered
-- SEQUENCE_CHECKS
--             the ids of sequences, by the time at which the sweep checks them
--
-- <prefix>:sequences:cancelled:<id>  the Unix time at which the sequence was cancelled, followed by ' dated' if the
--             cancel does not cover requests without a time of submission; expires when no earlier request can be waiting
--
-- A slot of an entry (SLOT in its state) has SLOT_WAITS first, and then:
local SLOT_WAITS, SLOT_SEQUENCE, SLOT_RUN, SLOT_INDEX, SLOT_LAST, SLOT_ON_ERROR = 1, 2, 3, 4, 5, 6
local ACTIVE_STATUSES, ENDED_STATUSES = {open = true, held = true}, {aborted = true, ended = true}
local SHARED_FIELDS = {
  'last_run', 'active', 'max_idle_s', 'max_age_s', 'max_active', 'max_waiting', 'on_error', 'gap_s', 'refuses', 'held',
  'aborted', 'ever_held', 'ever_released', 'ever_aborted', 'ever_cancelled', 'ever_idle', 'ever_aged', 'ever_gaps',
  'last_held', 'last_aborted', 'overrides', 'override_counts'}
-- Indexes of a run. The last two are missing if it has no override. FIRST_SCORE is the score of its first request, as
-- text.
local RUN_NUMBER, EXPECTED_INDEX, NEXT_FREE_INDEX, WAITING_COUNT, PASSED_COUNT = 1, 2, 3, 4, 5
local RUN_OVERRIDE, FIRST_SCORE = 6, 7
local leased_entries, shared_state, sequences_by_id = {}, nil, {}
local ready_count = 0 -- number of entries that became claimable in this script

-- Changes are collected here and written at the end of a script (`write_sequences`), so that many requests need few
-- commands: sequences that have changed, names in the queues of runs, entries whose turn has come (they are in the
-- lane), and entries that are to wait (they are leased). Before the queue of a run is read, its names are written.
local changed_sequences, ready_entries, waiting_entries = {}, {}, {}
local names_to_add, names_to_remove, runs_with_changes = {}, {}, {}
local function write_run_queues()
  run_in_batches('ZADD', RUN_QUEUES, names_to_add)
  run_in_batches('ZREM', RUN_QUEUES, names_to_remove)
  names_to_add, names_to_remove, runs_with_changes = {}, {}, {}
end

-- Set the slot of an entry. With false, the entry has no slot from now on.
local function set_slot(state, turn)
  if not turn and not state[SLOT] then return end
  set_extra(state, SLOT, turn)
end

local function to_digits(number) return string.format('%016d', number) end
local function slot_prefix(number, index) return string.format('%016d:%016.0f:', number, index) end

-- Return what all sequences share. The terms are the newest that a dispatcher sent; before the first, no sequence is
-- known. A script that may write here calls this before its first write, because it checks the types of the keys.
local function load_shared()
  if shared_state then return shared_state end
  features.check_types(features.sequences)
  shared_state = {
    last_run = 0, active = 0, held = 0, aborted = 0, ever_held = 0, ever_released = 0, ever_aborted = 0,
    ever_cancelled = 0, ever_idle = 0, ever_aged = 0, ever_gaps = 0, last_held = '', last_aborted = '',
    overrides = {}, override_counts = {},
  }
  local packed = call('HGET', SEQUENCES, '')
  local values = packed and cmsgpack.unpack(packed) or {}
  for at, name in ipairs(SHARED_FIELDS) do
    if values[at] ~= nil then shared_state[name] = values[at] end
  end
  shared_state.packed = packed
  return shared_state
end

-- Store the terms of a dispatcher: .max_idle_s, .max_age_s, .max_active (-1: any number), .max_waiting, .on_error,
-- .gap_s, .refuses (1 if requests after the end are rejected, or 0), and .overrides (a list of {name, max_idle_s,
-- max_active}, -1 for the general idle time and for no limit).
local function set_terms(terms)
  for name, value in pairs(terms) do shared_state[name] = value end
end

local function save_shared()
  if not shared_state.max_idle_s then return end -- no dispatcher has sent terms yet, so nothing has changed
  local values = {}
  for at, name in ipairs(SHARED_FIELDS) do values[at] = shared_state[name] end
  local packed = cmsgpack.pack(values)
  if packed ~= shared_state.packed then call('HSET', SEQUENCES, '', packed) end
  shared_state.packed = packed
end

-- Count an event of a sequence for the sequence counters (features/sequences/decisions.py).
local function count_event(what)
  load_shared()['ever_' .. what] = shared_state['ever_' .. what] + 1
end

-- Return the record of a sequence. All fields are written in one constructor, because a table that grows field by
-- field takes three times as long.
local function unpack_sequence(id, packed)
  local values = cmsgpack.unpack(packed)
  return {
    id = id, status = values[1], last_active_at = values[2], next_entry = values[3], next_run = values[4],
    next_is_last = values[5], next_on_error = values[6], began_at = values[7], gap_since = values[8],
    sticky_token = values[9], ended_count = values[10], failed_count = values[11], cause = values[12],
    conversation_bytes = values[13], runs = values[14], check_at = values[15], owner = values[16],
    override = values[17], parked_score = values[18],
  }
end
local function pack_sequence(sequence)
  return cmsgpack.pack({
    sequence.status, sequence.last_active_at, sequence.next_entry, sequence.next_run, sequence.next_is_last,
    sequence.next_on_error, sequence.began_at, sequence.gap_since, sequence.sticky_token, sequence.ended_count,
    sequence.failed_count, sequence.cause, sequence.conversation_bytes, sequence.runs, sequence.check_at,
    sequence.owner or false, sequence.override, sequence.parked_score,
  })
end

local function load_sequence(id)
  local sequence = sequences_by_id[id]
  if sequence ~= nil then return sequence end
  local packed = call('HGET', SEQUENCES, id)
  sequence = packed and unpack_sequence(id, packed) or nil
  sequences_by_id[id] = sequence or false
  return sequence
end

-- Remember records that were read by one HMGET. Operators have no permission for that command, so this is for owners
-- only.
local function cache_sequences(ids, packed_records)
  for number, packed in ipairs(packed_records) do
    sequences_by_id[ids[number]] = packed and unpack_sequence(ids[number], packed)
  end
end

-- The cancel markers of sequences by id; false for a sequence that was not cancelled.
local cancel_marks = {}
local function cancel_mark_key(id)
  return string.sub(RETURNED, 1, -1 - #'returned') .. 'sequences:cancelled:' .. id
end
local function get_cancel_mark(id)
  if cancel_marks[id] == nil then
    local at, suffix = string.match(call('GET', cancel_mark_key(id)) or '', '^(%S+)(.*)$')
    at = tonumber(at or '')
    cancel_marks[id] = at and {cancelled_at = at, covers_undated = suffix ~= ' dated'} or false
  end
  return cancel_marks[id]
end

-- Return why a cancel of the sequence ends a request that was submitted at this time (0: unknown), or nil.
local function find_cancel_reason(id, submitted_at)
  local mark = get_cancel_mark(id)
  if not mark then return nil end
  if submitted_at > 0 then return submitted_at <= mark.cancelled_at and 'the sequence was cancelled' or nil end
  return mark.covers_undated
    and 'the sequence was cancelled, and the request has no data.created that proves that it came later' or nil
end

local function next_run_number()
  load_shared().last_run = load_shared().last_run + 1
  return shared_state.last_run
end
local function new_run(next_index, override, first_score)
  local run = {next_run_number(), next_index, next_index, 0, 0}
  if override ~= '' then run[RUN_OVERRIDE], run[FIRST_SCORE] = override, first_score end
  return run
end

local function count_slots(sequence)
  local waiting, passed = 0, 0
  for _, run in ipairs(sequence.runs) do waiting, passed = waiting + run[WAITING_COUNT], passed + run[PASSED_COUNT] end
  return waiting, passed
end

local get_max_idle_s, has_room, has_room_in_override, set_status, park, find_first_parked, drop_parked
do

-- An override is known by its pattern; '' stands for none. In the terms, `overrides` is a list of arrays with the first
-- three indexes. In `override_counts`, each override of an active or parked sequence has the number of both.
local OVERRIDE_NAME, OVERRIDE_MAX_IDLE_S, OVERRIDE_MAX_ACTIVE = 1, 2, 3
local ACTIVE_COUNT, PARKED_COUNT = 1, 2
local parked_heads = {} -- the first parked sequence of each override (`read_parked_head`)

local function get_override(name)
  if name == '' then return nil end
  for _, override in ipairs(load_shared().overrides) do
    if override[OVERRIDE_NAME] == name then return override end
  end
end

function get_max_idle_s(sequence)
  local override = get_override(sequence.override)
  return override and override[OVERRIDE_MAX_IDLE_S] >= 0 and override[OVERRIDE_MAX_IDLE_S] or load_shared().max_idle_s
end

local function count_override(name, at, change)
  if name == '' or change == 0 then return end
  local all_counts = load_shared().override_counts
  local counts = all_counts[name] or {0, 0}
  counts[at] = math.max(0, counts[at] + change)
  all_counts[name] = (counts[ACTIVE_COUNT] > 0 or counts[PARKED_COUNT] > 0) and counts or nil
end

local function has_general_room()
  return load_shared().max_active < 0 or shared_state.active < shared_state.max_active
end
function has_room_in_override(name)
  local override, counts = get_override(name), load_shared().override_counts[name]
  return not override or override[OVERRIDE_MAX_ACTIVE] < 0
    or (counts and counts[ACTIVE_COUNT] or 0) < override[OVERRIDE_MAX_ACTIVE]
end
-- Return whether a sequence with this override may begin.
function has_room(override) return has_general_room() and has_room_in_override(override) end

-- Return the name of a parked sequence in PARKED. All names are one set, because keys must be declared. Those of an
-- override follow each other, so that its first sequence is found whatever the number of others.
local function parked_name(sequence)
  return sequence.override .. '\0' .. sortable_score(sequence.parked_score) .. sequence.id
end

-- Return the place of the first parked sequence of an override: score and id. False if there is none.
local function read_parked_head(override)
  if parked_heads[override] == nil then
    local name = call('ZRANGE', PARKED, '[' .. override .. '\0', '(' .. override .. '\1', 'BYLEX', 'LIMIT', 0, 1)[1]
    parked_heads[override] = name and string.sub(name, #override + 2) or false
  end
  return parked_heads[override]
end

function set_status(sequence, status)
  local active_change = (ACTIVE_STATUSES[status] and 1 or 0) - (ACTIVE_STATUSES[sequence.status] and 1 or 0)
  load_shared().active = shared_state.active + active_change
  count_override(sequence.override, ACTIVE_COUNT, active_change)
  for _, counted in ipairs({'held', 'aborted'}) do
    shared_state[counted] = shared_state[counted] + (status == counted and 1 or 0)
      - (sequence.status == counted and 1 or 0)
  end
  if sequence.status == 'parked' and status ~= 'parked' then
    call('ZREM', PARKED, parked_name(sequence))
    count_override(sequence.override, PARKED_COUNT, -1)
    parked_heads[sequence.override], sequence.parked_score = nil, ''
  end
  sequence.status = status
end

-- Park a sequence that is not active, or move a parked one forward if this score is better than its own.
function park(sequence, score)
  if sequence.status == 'parked' then
    if parse_score(score) >= parse_score(sequence.parked_score) then return end
    call('ZREM', PARKED, parked_name(sequence))
  else
    set_status(sequence, 'parked')
    count_override(sequence.override, PARKED_COUNT, 1)
  end
  sequence.parked_score = score
  call('ZADD', PARKED, 0, parked_name(sequence))
  parked_heads[sequence.override] = nil
end

-- Return the override and the place of the parked sequence that begins next: the first one, of those whose override has
-- room. Return nil if there is none.
function find_first_parked()
  if not has_general_room() then return nil end
  local best, best_place = '', read_parked_head('')
  for name, counts in pairs(shared_state.override_counts) do
    local place = counts[PARKED_COUNT] > 0 and has_room_in_override(name) and read_parked_head(name)
    if place and (not best_place or is_bytewise_before(place, best_place)) then best, best_place = name, place end
  end
  if best_place then return best, best_place end
end

-- Remove a parked sequence whose record was deleted by somebody else.
function drop_parked(override, place)
  call('ZREM', PARKED, override .. '\0' .. place)
  count_override(override, PARKED_COUNT, -1)
  parked_heads[override] = nil
end

end

-- Return a page of the queue of a run, in order.
local function read_run_queue(number, at, max_count)
  if runs_with_changes[number] then write_run_queues() end
  local low = to_digits(number)
  return call('ZRANGE', RUN_QUEUES, '[' .. low .. ':', '(' .. low .. ';', 'BYLEX', 'LIMIT', at, max_count)
end
local function find_at_index(number, index)
  if runs_with_changes[number] then write_run_queues() end
  local low = slot_prefix(number, index)
  return call('ZRANGE', RUN_QUEUES, '[' .. low, '(' .. string.sub(low, 1, -2) .. ';', 'BYLEX', 'LIMIT', 0, 1)[1]
end
local function slot_name(number, index, id) return slot_prefix(number, index) .. to_digits(id) end
local function parse_entry(name) return tonumber(string.sub(name, 35)) end -- nil for an index that has passed

local function delete_run_queue(number)
  repeat
    local names = read_run_queue(number, 0, 500)
    if #names > 0 then call('ZREM', RUN_QUEUES, unpack(names)) end
  until #names < 500
end

local function add_to_run(run, index, rest)
  runs_with_changes[run[RUN_NUMBER]] = true
  names_to_add[#names_to_add + 1], names_to_add[#names_to_add + 2] = '0', slot_prefix(run[RUN_NUMBER], index) .. rest
  run[NEXT_FREE_INDEX] = math.max(run[NEXT_FREE_INDEX], index + 1)
end
local function add_passed_index(run, index, last, failed, on_error, cause)
  local what = (last == 1 and '1' or '0') .. (failed == 1 and '1' or '0') .. (failed == 1 and on_error or 'continue')
  add_to_run(run, index, '-' .. what .. ':' .. cause)
  run[PASSED_COUNT] = run[PASSED_COUNT] + 1
end

local function save_conversation(sequence, bytes)
  if bytes == '' then
    if sequence.conversation_bytes > 0 then call('HDEL', CONVERSATIONS, sequence.id) end
  else
    call('HSET', CONVERSATIONS, sequence.id, bytes)
  end
  sequence.conversation_bytes = #bytes
end

local function begin_run(sequence)
  sequence.began_at, sequence.sticky_token, sequence.cause, sequence.ended_count, sequence.failed_count =
    false, '', '', 0, 0
  save_conversation(sequence, '')
end

local function begin_next_run(sequence)
  table.remove(sequence.runs, 1)
  begin_run(sequence)
  if sequence.status == 'held' then set_status(sequence, 'open') end
  local run = sequence.runs[1]
  local override = run[RUN_OVERRIDE] or ''
  if override == sequence.override then return end
  -- The sequence stays active if its new override has room. Its place within max_active is its own.
  set_status(sequence, 'ended')
  sequence.override = override
  if has_room_in_override(sequence.override) then set_status(sequence, 'open')
  else park(sequence, run[FIRST_SCORE]) end
end

local function delete_sequence(sequence)
  for _, run in ipairs(sequence.runs) do
    if run[PASSED_COUNT] > 0 then delete_run_queue(run[RUN_NUMBER]) end
  end
  save_conversation(sequence, '')
  set_status(sequence, 'ended')
  call('HDEL', SEQUENCES, sequence.id)
  call('ZREM', SEQUENCE_CHECKS, sequence.id)
  sequences_by_id[sequence.id], sequence.is_deleted = false, true
end

local function fail_remaining(run, code, why)
  if run[WAITING_COUNT] > 0 then
    call('ZADD', CLOSED_RUNS, run[RUN_NUMBER], to_digits(run[RUN_NUMBER]) .. ':' .. code .. ':' .. why)
  elseif run[PASSED_COUNT] > 0 then
    delete_run_queue(run[RUN_NUMBER])
  end
  run[WAITING_COUNT], run[PASSED_COUNT] = 0, 0
end

local function close_run(sequence, status, code, why, now)
  if status == 'aborted' then
    count_event('aborted')
    shared_state.last_aborted = sequence.id
  end
  fail_remaining(sequence.runs[1], code, why)
  if #sequence.runs > 1 then
    begin_next_run(sequence)
    return
  end
  sequence.runs = {new_run(sequence.runs[1][EXPECTED_INDEX], sequence.override, 'inf')}
  set_status(sequence, status)
  sequence.sticky_token, sequence.cause, sequence.last_active_at = '', why, now
  save_conversation(sequence, '')
end

local function end_run(sequence, why, now)
  local run = sequence.runs[1]
  if load_shared().refuses == 1 then
    close_run(sequence, 'ended', 'SEQUENCE_ENDED', why, now)
  elseif run[WAITING_COUNT] > 0 then
    begin_run(sequence)
    run[EXPECTED_INDEX] = tonumber(string.sub(read_run_queue(run[RUN_NUMBER], 0, 1)[1], 18, 33))
  elseif #sequence.runs > 1 then
    if run[PASSED_COUNT] > 0 then delete_run_queue(run[RUN_NUMBER]) end
    begin_next_run(sequence)
  else
    delete_sequence(sequence)
  end
end

local function end_run_if_old(sequence, now)
  if not sequence.is_deleted and sequence.status == 'open' and sequence.began_at
    and now >= sequence.began_at + load_shared().max_age_s then
    count_event('aged')
    end_run(sequence, 'it had run for max_age_s', now)
  end
end

local function apply_end(sequence, last, on_error, cause, now)
  if last then
    end_run(sequence, 'its last request has ended', now)
  elseif on_error == 'abort' then
    close_run(sequence, 'aborted', 'SEQUENCE_ABORTED', cause, now)
  elseif on_error == 'hold' then
    set_status(sequence, 'held')
    sequence.cause = cause
    count_event('held')
    shared_state.last_held = sequence.id
  end
end

-- Make a slot the next request. Return false if its entry has ended.
local function promote_slot(sequence, id, now)
  local state = leased_entries[id] or waiting_entries[id] or load_entry(id)
  if not state or not state[SLOT] then return false end
  if not leased_entries[id] then
    if not waiting_entries[id] then
      -- The last five fields are set by claim_next.
      ready_entries[#ready_entries + 1] =
        {id = id, state = state, score_value = 0, goes_first = false, tie_break = '', lane = false, member = false}
    end
    ready_count = ready_count + 1
  end
  state[SLOT][SLOT_WAITS] = 0
  sequence.next_entry, sequence.next_run = id, state[SLOT][SLOT_RUN]
  sequence.next_is_last, sequence.next_on_error = state[SLOT][SLOT_LAST], state[SLOT][SLOT_ON_ERROR]
  sequence.began_at, sequence.last_active_at = sequence.began_at or now, now
  return true
end

-- Make the first slot the next request if its turn has come.
local function advance_sequence(sequence, now)
  local gap = sequence.gap_since
  sequence.gap_since = false
  while not sequence.is_deleted and not sequence.next_entry and ACTIVE_STATUSES[sequence.status] do
    local is_held, run = sequence.status == 'held', sequence.runs[1]
    local name = run[WAITING_COUNT] + run[PASSED_COUNT] > 0 and read_run_queue(run[RUN_NUMBER], 0, 1)[1]
    if not name then
      run[WAITING_COUNT], run[PASSED_COUNT] = 0, 0
      if is_held or #sequence.runs == 1 then return end
      begin_next_run(sequence)
    else
      local index, id = tonumber(string.sub(name, 18, 33)), parse_entry(name)
      if index > run[EXPECTED_INDEX] and is_held then return end
      if index > run[EXPECTED_INDEX] and #sequence.runs == 1 then
        gap = gap or now
        if now < gap + load_shared().gap_s then
          sequence.gap_since = gap
          return
        end
        count_event('gaps')
      end
      local last, failed, on_error, cause
      if not id then last, failed, on_error, cause = string.match(name, '^%d+:%d+:%-(%d)(%d)(%a+):(.*)$') end
      if is_held and (id or last == '1') then return end
      names_to_remove[#names_to_remove + 1], runs_with_changes[run[RUN_NUMBER]] = name, true
      run[EXPECTED_INDEX], run[NEXT_FREE_INDEX], gap = index + 1, math.max(run[NEXT_FREE_INDEX], index + 1), false
      if id then
        run[WAITING_COUNT] = run[WAITING_COUNT] - 1
        if promote_slot(sequence, id, now) then return end
      else
        run[PASSED_COUNT] = run[PASSED_COUNT] - 1
        sequence.ended_count, sequence.failed_count = sequence.ended_count + 1, sequence.failed_count + tonumber(failed)
        if not is_held then apply_end(sequence, last == '1', on_error, cause, now) end
      end
    end
  end
end

local function mark_changed(sequence) changed_sequences[#changed_sequences + 1] = sequence end

local function unpark_sequences(now)
  for _ = 1, MAX_UNPARKED_PER_STEP do
    local override, place = find_first_parked()
    if not override then return end
    local sequence = load_sequence(string.sub(place, 17)) -- behind the score
    if sequence and sequence.status == 'parked' then
      set_status(sequence, 'open')
      advance_sequence(sequence, now)
      mark_changed(sequence)
    else
      drop_parked(override, place)
    end
  end
end

local function update_sequence(sequence, now)
  advance_sequence(sequence, now)
  mark_changed(sequence)
  unpark_sequences(now)
end

-- Return entries to their places in the queue.
local function return_all_to_queue(items)
  local states, sets = {}, {}
  for _, item in ipairs(items) do
    local state = item.state
    local at = 2 + (choose_lane(state) or 0)
    local set = sets[at] or {}
    state[LOCATION], state[MOVES] = WAITING_LETTERS[at], state[MOVES] + 1
    sets[at], set[#set + 1], set[#set + 2] = set, state[SCORE], ordered_name(item.id, state)
    states[#states + 1], states[#states + 2] = item.id, cmsgpack.pack(state)
  end
  for at, set in pairs(sets) do run_in_batches('ZADD', WAITING_SETS[at], set) end
  run_in_batches('HSET', ENTRIES, states)
end

-- Move the entries whose turn has come from the lane to the queue.
local function return_ready_entries()
  local names = {}
  for number, item in ipairs(ready_entries) do names[number] = ordered_name(item.id, item.state) end
  run_in_batches('ZREM', SEQUENCED, names)
  return_all_to_queue(ready_entries)
  ready_entries = {}
end

local write_sequences
do

-- Return the time at which the passing of time may change the sequence.
local function compute_check_at(sequence, now)
  if sequence.next_entry then return now + CHECK_INTERVAL_S end
  local terms = load_shared()
  local max_idle_s = get_max_idle_s(sequence)
  local due = now + math.max(max_idle_s, CHECK_INTERVAL_S)
  if count_slots(sequence) == 0 then due = sequence.last_active_at + max_idle_s end
  if sequence.gap_since then due = math.min(due, sequence.gap_since + terms.gap_s) end
  if sequence.status == 'open' and sequence.began_at then due = math.min(due, sequence.began_at + terms.max_age_s) end
  return due
end

-- Write all that this script has changed.
function write_sequences(now)
  write_run_queues()
  return_ready_entries()
  local packed, checks = {}, {}
  for _, sequence in ipairs(changed_sequences) do
    if not sequence.is_deleted and not sequence.is_saved then
      sequence.is_saved = true
      local due = compute_check_at(sequence, now)
      -- A check that comes too early changes nothing and schedules the next one. Most sequences have an earlier check
      -- scheduled, and need no other.
      if not sequence.check_at or sequence.check_at <= now or sequence.check_at > due then
        sequence.check_at = due
        checks[#checks + 1], checks[#checks + 2] = format_float(due), sequence.id
      end
      packed[#packed + 1], packed[#packed + 2] = sequence.id, pack_sequence(sequence)
    end
  end
  if #packed > 0 then features.record_stored(features.sequences) end
  run_in_batches('HSET', SEQUENCES, packed)
  run_in_batches('ZADD', SEQUENCE_CHECKS, checks)
  if shared_state then save_shared() end
end
end

local function sequence_full(max_count)
  return 'SEQUENCE_FULL', string.format('%.0f requests of its sequence wait already', max_count)
end

-- Return the code and the message with which a turn is rejected, or nil. A turn has .id, .index (nil: after all
-- others), .last (0 or 1), .reset, .owner, .submitted_at (0: unknown) and .override.
local function find_rejection(sequence, turn, now)
  local terms = load_shared()
  local max_count = terms.max_waiting
  -- This check comes first, so that another producer learns nothing but that the sequence is not its own. A sequence
  -- that an operator ended before it began has no owner; its first request sets the owner.
  if sequence and sequence.owner and sequence.owner ~= turn.owner then
    return 'SEQUENCE_DENIED', 'its sequence belongs to another producer'
  end
  local cancelled = find_cancel_reason(turn.id, turn.submitted_at)
  if cancelled then return 'CANCELLED', cancelled end
  if sequence and ENDED_STATUSES[sequence.status] and not turn.reset then
    sequence.last_active_at = now
    mark_changed(sequence)
    return sequence.status == 'aborted' and 'SEQUENCE_ABORTED' or 'SEQUENCE_ENDED', sequence.cause
  end
  if not sequence or ENDED_STATUSES[sequence.status] then
    local can_go = has_room(turn.override) and (turn.reset or (turn.index or 0) == 0)
    if can_go or max_count > 0 then return nil end
    return sequence_full(max_count)
  end
  local run = sequence.runs[#sequence.runs]
  local index = turn.index or run[NEXT_FREE_INDEX]
  if not turn.reset then
    if index < run[EXPECTED_INDEX] then
      return 'SEQUENCE_INDEX', string.format('index %.0f: %.0f is next', index, run[EXPECTED_INDEX])
    elseif index < run[NEXT_FREE_INDEX] and find_at_index(run[RUN_NUMBER], index) then
      return 'SEQUENCE_INDEX', string.format('index %.0f was there before', index)
    end
  end
  local can_go = sequence.status == 'open' and not sequence.next_entry and #sequence.runs == 1
  if turn.reset then can_go = can_go and run[WAITING_COUNT] + run[PASSED_COUNT] == 0
  else can_go = can_go and index == run[EXPECTED_INDEX] end
  if can_go then return nil end
  local waiting, passed = count_slots(sequence)
  if waiting + passed >= max_count or (turn.reset and #sequence.runs >= MAX_RUNS) then
    return sequence_full(max_count)
  end
end

-- Return the granted turn: index, sticky token, 1 if it is the first of a run, conversation.
local function granted_turn(sequence, state)
  local conversation = sequence.conversation_bytes > 0 and call('HGET', CONVERSATIONS, sequence.id) or ''
  return state[SLOT][SLOT_INDEX], sequence.sticky_token, sequence.ended_count == 0 and 1 or 0, conversation
end

local function add_sequence(id)
  local sequence = {
    id = id, status = 'ended', next_entry = false, next_run = 0, next_is_last = 0, next_on_error = '', gap_since = false,
    conversation_bytes = 0, override = '', parked_score = '',
  }
  sequences_by_id[id] = sequence
  return sequence
end

-- Return the sequence with a run that takes the turn, and the index of the turn in that run.
local function join_run(sequence, turn, score, now)
  local fresh = not sequence or ENDED_STATUSES[sequence.status]
  sequence = sequence or add_sequence(turn.id)
  sequence.owner = sequence.owner or turn.owner
  if fresh then
    begin_run(sequence)
    sequence.runs, sequence.override = {}, turn.override
    if has_room(turn.override) then set_status(sequence, 'open') else park(sequence, score) end
  end
  if fresh or turn.reset then
    sequence.runs[#sequence.runs + 1] = new_run(turn.reset and turn.index or 0, turn.override, score)
  end
  sequence.last_active_at = now
  if sequence.status == 'parked' then park(sequence, score) end
  return sequence, turn.index or sequence.runs[#sequence.runs][NEXT_FREE_INDEX]
end

-- Handle the end of a request that never claimed its turn. If later requests would wait for its index, the index has
-- passed.
local function pass_index(turn_end, now)
  if not load_shared().gap_s then return end -- no dispatcher has sent terms, so this queue has no sequences
  local failed, sequence = turn_end.failed, load_sequence(turn_end.id)
  local on_error = turn_end.on_error ~= '' and turn_end.on_error or shared_state.on_error
  if not turn_end.index and (failed == 0 or on_error == 'continue') then return end
  if (not sequence or ENDED_STATUSES[sequence.status]) and not has_room(turn_end.override) then return end
  if find_rejection(sequence, turn_end, now) then return end
  local index
  sequence, index = join_run(sequence, turn_end, 'inf', now)
  add_passed_index(sequence.runs[#sequence.runs], index, turn_end.last, failed, on_error, turn_end.cause)
  update_sequence(sequence, now)
end

-- Handle the end of an entry. `turn_end` is nil, or a turn (see `find_rejection`) with .on_error ('': as the terms
-- say), .failed (0 or 1), .cause, .sticky_token (nil: unchanged), and .has_conversation, which is true if
-- `conversation` is to be stored.
local function end_turn(id, state, turn_end, conversation, now)
  local turn = state and state[SLOT]
  if not turn then
    if turn_end then pass_index(turn_end, now) end
    return
  end
  set_slot(state, false)
  local failed, cause = turn_end and turn_end.failed or 0, turn_end and turn_end.cause or ''
  local sequence, number, index = load_sequence(turn[SLOT_SEQUENCE]), turn[SLOT_RUN], turn[SLOT_INDEX]
  if sequence and sequence.next_entry == id then
    sequence.next_entry, sequence.last_active_at = false, now
    -- A parked sequence has a request of its present run in flight if it was parked by a reset, then cancelled.
    if (sequence.status == 'open' or sequence.status == 'parked')
      and sequence.next_run == sequence.runs[1][RUN_NUMBER] then
      if turn_end and turn_end.sticky_token then sequence.sticky_token = turn_end.sticky_token end
      if turn_end and turn_end.has_conversation then save_conversation(sequence, conversation) end
      sequence.ended_count, sequence.failed_count = sequence.ended_count + 1, sequence.failed_count + failed
      apply_end(sequence, sequence.next_is_last == 1, failed == 1 and sequence.next_on_error or 'continue', cause, now)
      end_run_if_old(sequence, now)
    end
    update_sequence(sequence, now)
    return
  end
  if turn[SLOT_WAITS] ~= 1 then return end -- it was the next request of its run until the sweep gave it up
  write_run_queues()
  call('ZREM', RUN_QUEUES, slot_name(number, index, id))
  for _, run in ipairs(sequence and sequence.runs or {}) do
    if run[RUN_NUMBER] == number then
      run[WAITING_COUNT] = run[WAITING_COUNT] - 1
      add_passed_index(run, index, turn[SLOT_LAST], failed, turn[SLOT_ON_ERROR], cause)
      sequence.last_active_at = now
      update_sequence(sequence, now)
      return
    end
  end
  repeat -- its run is closed: the last remaining request deletes the indexes that have passed, too
    local names, left = read_run_queue(number, 0, 100), false
    for _, name in ipairs(names) do
      left = left or parse_entry(name)
      if not left then call('ZREM', RUN_QUEUES, name) end
    end
  until left or #names < 100
  if #read_run_queue(number, 0, 1) == 0 then
    for _, name in ipairs(call('ZRANGEBYSCORE', CLOSED_RUNS, number, number)) do call('ZREM', CLOSED_RUNS, name) end
  end
end
