-- Check the sequences whose time has come.
-- Uses: sequences
-- Hooks: sweep

-- Check a sequence whose check is due.
local function check_sequence(sequence, now)
  sequence.check_at = false
  sequence.last_active_at = math.min(sequence.last_active_at, now)
  sequence.began_at, sequence.gap_since =
    sequence.began_at and math.min(sequence.began_at, now), sequence.gap_since and math.min(sequence.gap_since, now)
  if not sequence.next_entry then
    if count_slots(sequence) > 0 or now < sequence.last_active_at + get_max_idle_s(sequence) then
      end_run_if_old(sequence, now)
    elseif ENDED_STATUSES[sequence.status] then
      delete_sequence(sequence)
    else
      count_event('idle')
      end_run(sequence, 'no request of it ran or waited for max_idle_s', now)
    end
  end
  advance_sequence(sequence, now)
  mark_changed(sequence)
end

-- Check the sequences that are due, some of them at most. Return the number of requests whose turn has come. The oldest
-- run comes first, and no parked sequence begins before all were checked, so that the result does not depend on checks
-- that came too early.
function features.sequences.swept(now)
  if not features.sequences.is_used then return 0 end
  load_shared()
  local max_count = MAX_SEQUENCES_PER_SWEEP
  local ids, due = call('ZRANGEBYSCORE', SEQUENCE_CHECKS, '-inf', format_float(now), 'LIMIT', 0, max_count), {}
  for _, id in ipairs(ids) do
    local sequence = load_sequence(id)
    if sequence then due[#due + 1] = sequence else call('ZREM', SEQUENCE_CHECKS, id) end
  end
  table.sort(due, function(a, b) return a.runs[1][RUN_NUMBER] < b.runs[1][RUN_NUMBER] end)
  for _, sequence in ipairs(due) do check_sequence(sequence, now) end
  if call('ZCARD', PARKED) > 0 then
    for _ = 0, #due do unpark_sequences(now) end
  end
  write_sequences(now)
  return ready_count, #ids == max_count
end
