-- Count what lies where, at one moment; leases of all lines of the pool.
-- KEYS   own…
-- Returns now, pending (with returned and suspects), leased, delayed, dead, units of the leases
-- Keeps: reads only.
return {
  text(clock()),
  call('ZCARD', PENDING) + call('ZCARD', RETURNED) + call('ZCARD', SUSPECTS),
  call('ZCARD', LEASES), call('ZCARD', DELAYED), call('ZCARD', DEAD),
  call('ZCARD', LEASES) + tonumber(call('HGET', CONTROL, 'more') or 0),
}
