-- Count the requests by location, at one moment. Leases are those of all queues of the pool.
-- Uses: require_commands, common
-- Keys: queue
-- Returns now, pending (with returned and lanes), leases, delayed, dead, units of the leases, what all sequences
--         share (sequences.lua: SHARED_FIELDS), sequences that may not begin yet, requests that wait for their turn,
--         requests that wait for their model, requests that wait for their next slice
-- Guarantees: only reads.
local waiting = 0
for _, set in ipairs(WAITING_SETS) do waiting = waiting + call('ZCARD', set) end
return {
  format_float(current_time()), waiting,
  call('ZCARD', LEASES), call('ZCARD', DELAYED), call('ZCARD', DEAD),
  call('ZCARD', LEASES) + tonumber(call('HGET', CONTROL, 'extra_units') or 0),
  call('HGET', SEQUENCES, '') or '', call('ZCARD', PARKED), call('ZCARD', SEQUENCED), call('ZCARD', WAITING_FOR_MODEL),
  call('ZCARD', STARTED),
}
