-- Claim the turns of leased requests of sequences, once they were parsed. Requests whose turn has not come return to
-- the queue and wait.
-- Uses: owner_commands, common, sequences
-- Keys: queue
-- Arguments: owner, lease_s: number, terms: packed, turns: packed
-- `terms`: see `set_terms`. `turns` is a list of turns (see `find_rejection`) with .entry_id, .lease_token and
-- .on_error.
-- Returns {owner reply, {a decision per lease}}. A decision is {1, index, sticky token, 1 if it is the first of a
--         run, conversation} if the turn is granted; {0} if the request waits or is no longer the caller's; {2, code,
--         message} if the turn is rejected, and the lease stays the caller's.
-- Guarantees: at most one request of a sequence has the turn, until that request has ended. A repetition of the call
-- grants the same turns and lets the same requests wait. A request that waits was not delivered.
local now, shared = current_time(), load_control()
load_shared()
begin_writes()
correct_future_times(shared, now)
set_terms(terms)
local decisions, ids, states, granted, waiting = {}, {}, {}, {}, {}

local function claim_turn(id, state, turn)
  local sequence = load_sequence(turn.id)
  if sequence and sequence.next_entry == id and state[SLOT] then return {1, granted_turn(sequence, state)} end
  local code, message = find_rejection(sequence, turn, now)
  if code then return {2, code, message} end
  local index
  sequence, index = join_run(sequence, turn, state[SCORE], now)
  local run = sequence.runs[#sequence.runs]
  set_slot(state, {1, turn.id, run[RUN_NUMBER], index, turn.last, turn.on_error})
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
for number, turn in ipairs(turns) do ids[number], sequence_ids[turn.id] = turn.entry_id, true end
if #ids > 0 then
  for number, packed in ipairs(call('HMGET', ENTRIES, unpack(ids))) do
    states[ids[number]] = packed and cmsgpack.unpack(packed) or nil
  end
  local sequences = {}
  for name in pairs(sequence_ids) do sequences[#sequences + 1] = name end
  cache_sequences(sequences, call('HMGET', SEQUENCES, unpack(sequences)))
end
for number, turn in ipairs(turns) do
  local id, state = turn.entry_id, states[turn.entry_id]
  local is_held = state and state[LOCATION] == 'L' and state[TOKEN] == turn.lease_token and not waiting_entries[id]
  decisions[number] = is_held and claim_turn(id, state, turn) or {0}
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
