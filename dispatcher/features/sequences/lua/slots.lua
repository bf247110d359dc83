-- Requests of sequences: the slot of an entry, and the lane in which requests wait for their turn (sequences.lua).
-- Feature: sequences
-- Extra: SLOT 14
-- Keys: SEQUENCED zset sequenced, SEQUENCES hash sequences, CONVERSATIONS hash sequences:conversations,
--     RUN_QUEUES zset sequences:turns, PARKED zset sequences:parked, CLOSED_RUNS zset sequences:closed-runs,
--     SEQUENCE_CHECKS zset sequences:checks
-- Lane: SEQUENCED Q closed
-- Other keys: sequences:secret, sequences:cancelled:<id>
-- Constants: CHECK_INTERVAL_S 30, MAX_SEQUENCES_PER_SWEEP 200, MAX_UNPARKED_PER_STEP 100, MAX_RUNS 100,
--     MAX_WAITING_SHOWN 20
--
-- CHECK_INTERVAL_S is the interval of checks of a request whose turn it is: an owner of a version that knows no
-- sequences ends it without telling the sequence. MAX_SEQUENCES_PER_SWEEP is the number of due sequences that one sweep
-- checks, MAX_UNPARKED_PER_STEP of parked sequences that begin in one step, MAX_RUNS of waiting runs of one sequence,
-- and MAX_WAITING_SHOWN of waiting requests that are shown.
--
-- SLOT in the state of an entry is its slot in a sequence, for as long as the sequence knows it.
local sequences = features.sequences
local SLOT_WAITS = 1 -- first element of a slot: 1 if the entry waits for its turn

sequences.timed_key = SEQUENCE_CHECKS
function sequences.lane.contains(state) return state[SLOT] and state[SLOT][SLOT_WAITS] == 1 end
-- Each sequence has a check. The remaining requests of a closed run are in the lane.
function sequences.has_data() return call('EXISTS', SEQUENCE_CHECKS, SEQUENCED) > 0 end
-- Return what all sequences share (SHARED_FIELDS), the sequences that may not begin yet, and the waiting requests.
function sequences.count()
  return {call('HGET', SEQUENCES, '') or '', call('ZCARD', PARKED), call('ZCARD', SEQUENCED)}
end
