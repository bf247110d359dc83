-- Show sequences, or change one.
-- Uses: require_commands, common, sequences
-- Keys: queue
-- Arguments: command, id, cursor: text?, max_count: number?, status: text?, why: text?, default_terms: packed,
--     cancelled_at: number?, keep_s: number?
-- The command is one of these. Each has the id of a sequence, except for "list".
--   "list":     `cursor`, `max_count`, `status` (empty: any)
--   "show", "release", "forget"
--   "abort":    `why`, and `default_terms` for a queue that has had no sequence yet (see `set_terms`)
--   "cancel":   `cancelled_at` (Unix time; nil: now), and `keep_s` for which earlier requests may wait to be claimed
-- Returns for "list" {cursor, {a `build_row`…}}; for "show" a row, or false; for "release" and "abort" 1, or 0 if
--         there was nothing to do; for "cancel" the entry of the next request or 0, or false if the sequence had
--         ended or is not known; for "forget" 1, 0 if a request of the sequence runs or waits, or false if the
--         sequence is not known
-- Guarantees: waiting requests are answered or stay in the sequence, and a running request goes on to its end. No
-- request from before a cancel begins.
require_commands('HSCAN', 'HGET', 'HSET', 'HDEL', 'ZADD', 'ZREM', 'ZRANGE', 'ZRANGEBYSCORE', 'GET', 'SET', 'TTL')
local now = current_time()
load_shared()
features.check_used()

local function build_row(sequence, max_count)
  local run, waiting_rows, at = sequence.runs[1], {}, 0
  repeat
    local names = max_count > 0 and read_run_queue(run[RUN_NUMBER], at, max_count) or {}
    for _, name in ipairs(names) do
      if parse_entry(name) and #waiting_rows < 2 * max_count then
        waiting_rows[#waiting_rows + 1], waiting_rows[#waiting_rows + 2] =
          tonumber(string.sub(name, 18, 33)), parse_entry(name)
      end
    end
    at = at + max_count
  until #names < max_count or max_count == 0 or #waiting_rows == 2 * max_count
  local waiting_count = count_slots(sequence)
  return {
    sequence.id, sequence.status, run[EXPECTED_INDEX], sequence.next_entry, waiting_count, #sequence.runs,
    sequence.ended_count, sequence.failed_count, sequence.began_at and format_float(sequence.began_at),
    format_float(sequence.last_active_at), sequence.gap_since and format_float(sequence.gap_since),
    sequence.sticky_token ~= '' and 1 or 0, sequence.conversation_bytes, sequence.cause, waiting_rows,
    sequence.override,
  }
end

if command == 'list' then
  local page, rows = call('HSCAN', SEQUENCES, cursor, 'COUNT', max_count), {}
  for at = 1, #page[2], 2 do
    local sequence = page[2][at] ~= '' and load_sequence(page[2][at])
    if sequence and (status == '' or status == sequence.status) then rows[#rows + 1] = build_row(sequence, 0) end
  end
  return {page[1], rows}
end

local sequence = load_sequence(id)
if command == 'show' then return sequence and build_row(sequence, MAX_WAITING_SHOWN) end
if command == 'release' then
  if not sequence or sequence.status ~= 'held' then return 0 end
  set_status(sequence, 'open')
  sequence.cause, sequence.last_active_at = '', now
  count_event('released')
  update_sequence(sequence, now)
  write_sequences(now)
  return 1
end
if command == 'forget' then
  local key, mark = cancel_mark_key(id), get_cancel_mark(id)
  local covers_undated = mark and mark.covers_undated
  if sequence and (sequence.next_entry or count_slots(sequence) > 0) then return 0 end
  -- Requests without a time of submission may begin the forgotten sequence anew; dated ones stay cancelled.
  if covers_undated then
    call('SET', key, string.format('%.17g dated', mark.cancelled_at), 'EX', math.max(1, call('TTL', key)))
  end
  if not sequence then return covers_undated and 1 or false end
  delete_sequence(sequence)
  update_sequence(sequence, now)
  write_sequences(now)
  return 1
end
-- Add a sequence of which no request was claimed yet, so that it can end before it begins.
local function add_unbegun()
  local unbegun = add_sequence(id)
  begin_run(unbegun)
  unbegun.runs = {new_run(0, '', 'inf')}
  return unbegun
end

if command == 'abort' then
  if sequence and ENDED_STATUSES[sequence.status] then return 0 end
  if not shared_state.max_idle_s then
    set_terms(default_terms)
  end
  sequence = sequence or add_unbegun()
  close_run(sequence, 'aborted', 'SEQUENCE_ABORTED', why, now)
  update_sequence(sequence, now)
  write_sequences(now)
  return 1
end
local key, previous_mark = cancel_mark_key(id), get_cancel_mark(id)
local at, kept_s = cancelled_at or now, math.ceil(keep_s)
if previous_mark then at, kept_s = math.max(at, previous_mark.cancelled_at), math.max(kept_s, call('TTL', key)) end
call('SET', key, string.format('%.17g', at), 'EX', math.max(1, kept_s))
if not sequence and shared_state.refuses == 1 then
  sequence = add_unbegun()
  close_run(sequence, 'ended', 'SEQUENCE_ENDED', 'the sequence was cancelled', now)
  update_sequence(sequence, now)
  write_sequences(now)
  return false
end
if not sequence or ENDED_STATUSES[sequence.status] then return false end
count_event('cancelled')
local next_index = sequence.runs[1][EXPECTED_INDEX]
for _, run in ipairs(sequence.runs) do fail_remaining(run, 'CANCELLED', 'the sequence was cancelled') end
sequence.runs = {new_run(next_index, sequence.override, 'inf')}
if sequence.next_entry then sequence.next_run, sequence.next_is_last = sequence.runs[1][RUN_NUMBER], 1
else end_run(sequence, 'the sequence was cancelled', now) end
update_sequence(sequence, now)
write_sequences(now)
return sequence.next_entry or 0
