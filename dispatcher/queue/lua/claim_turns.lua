-- Claim the turns of leased requests of sequences, once they were parsed. Requests whose turn has not come return to
-- the queue and wait.
-- KEYS   common keys…
-- ARGV   owner, lease_s, then packed: the terms (max_idle_s, max_age_s, max_active or -1, max_waiting, on_error,
--        gap_s, 1 if requests after the end are rejected, or 0), and a list of leases: {id, token, sequence id, index
--        (-1: none), last, reset (0/1 each), on_error, owner of the sequence, time of submission (0: unknown)}…
-- Returns {owner reply, {a decision per lease}}. A decision is {1, index, sticky token, 1 if it is the first of a
--         run, conversation} if the turn is granted; {0} if the request waits or is no longer the caller's; {2, code,
--         message} if the turn is rejected, and the lease stays the caller's.
-- Guarantees: at most one request of a sequence has the turn, until that request has ended. A repetition of the call
-- grants the same turns and lets the same requests wait. A request that waits was not delivered.
local owner, lease_s = ARGV[1], tonumber(ARGV[2])
local terms, turns = cmsgpack.unpack(ARGV[3]), cmsgpack.unpack(ARGV[4])
local now, shared = current_time(), load_control()
load_shared()
begin_writes()
correct_future_times(shared, now)
shared_state.max_idle_s, shared_state.max_age_s, shared_state.max_active = terms[1], terms[2], terms[3]
shared_state.max_waiting, shared_state.on_error, shared_state.gap_s, shared_state.refuses =
  terms[4], terms[5], terms[6], terms[7]
local decisions, ids, states, granted, waiting = {}, {}, {}, {}, {}

local function claim_turn(id, state, turn, on_error)
  local sequence = load_sequence(turn.id)
  if sequence and sequence.next_entry == id and state[SLOT] then return {1, granted_turn(sequence, state)} end
  local code, message = find_rejection(sequence, turn, now)
  if code then return {2, code, message} end
  local index
  sequence, index = join_run(sequence, turn, state[SCORE], now)
  local run = sequence.runs[#sequence.runs]
  set_slot(state, {1, turn.id, run[RUN_NUMBER], index, turn.last, on_error})
  leased_entries[id] = state
  if sequence.status == 'open' and not sequence.next_entry and #sequence.runs == 1
    and index == run[EXPECTED_INDEX] then -- no other slot can be before it
    sequence.gap_since = false
    run[EXPECTED_INDEX], run[NEXT_FREE_INDEX] = index + 1, math.max(run[NEXT_FREE_INDEX], index + 1)
    promote_slot(sequence, id, now)
    mark_changed(sequence)
    unpark_sequences(now)
  else
    add_to_run(run, index, to_digits(id))
    run[WAITING_COUNT] = run[WAITING_COUNT] + 1
    update_sequence(sequence, now)
  end
  leased_entries[id] = nil
  if sequence.next_entry == id then
    granted[#granted + 1], granted[#granted + 2] = id, cmsgpack.pack(state)
    return {1, granted_turn(sequence, state)}
  end
  waiting_entries[id] = state
  waiting[#waiting + 1] = {id = id, state = state}
  return {0}
end

local sequence_ids = {}
for number, row in ipairs(turns) do ids[number], sequence_ids[row[3]] = row[1], true end
if #ids > 0 then
  for number, packed in ipairs(call('HMGET', ENTRIES, unpack(ids))) do
    states[ids[number]] = packed and cmsgpack.unpack(packed) or nil
  end
  local sequences = {}
  for name in pairs(sequence_ids) do sequences[#sequences + 1] = name end
  cache_sequences(sequences, call('HMGET', SEQUENCES, unpack(sequences)))
end
for number, row in ipairs(turns) do
  local id, state = row[1], states[row[1]]
  local is_held = state and state[LOCATION] == 'L' and state[TOKEN] == row[2] and not waiting_entries[id]
  local turn = {
    id = row[3], index = row[4] >= 0 and row[4] or nil, last = row[5], reset = row[6] == 1, owner = row[8],
    submitted_at = row[9],
  }
  decisions[number] = is_held and claim_turn(id, state, turn, row[7]) or {0}
end
run_in_batches('HSET', ENTRIES, granted)
end_leases(waiting, shared.probe)
for _, item in ipairs(waiting) do
  item.state[DELIVERIES] = item.state[DELIVERIES] - 1
end
return_all_to_queue(waiting)
write_sequences(now)
if call('HEXISTS', CONTROL, 'probe') == 0 then shared.probe, shared.prober = nil, nil end
return {build_owner_reply(shared, now, owner, lease_s), decisions}
