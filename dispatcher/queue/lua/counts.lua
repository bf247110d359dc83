-- Count what lies where, at one moment; leases of all lines of the pool.
-- KEYS   own…
-- Returns now, pending (with returned and lanes), leased, delayed, dead, units of the leases, what all sequences share
--         (sequences.lua: SHARED), ids that may not begin yet, requests in line, requests that wait for their model
-- Keeps: reads only.
local waiting = 0
for _, set in ipairs(WAITING) do waiting = waiting + call('ZCARD', set) end
return {
  text(clock()), waiting,
  call('ZCARD', LEASES), call('ZCARD', DELAYED), call('ZCARD', DEAD),
  call('ZCARD', LEASES) + tonumber(call('HGET', CONTROL, 'more') or 0),
  call('HGET', SEQUENCES, '') or '', call('ZCARD', PARKED), call('ZCARD', SEQUENCED), call('ZCARD', ABSENT),
}
