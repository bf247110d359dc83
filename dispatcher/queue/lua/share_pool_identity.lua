-- Record which pool a dispatcher sends to, and read which pools the dispatchers of the queue send to.
-- Uses: time
-- Keys: IDENTITIES
-- Arguments: identity, valid_s: number, max_count: number
-- An empty `identity` only reads.
-- Returns the identities that were recorded within valid_s, at most `max_count`
-- Guarantees: the key holds only identities of the last valid_s, and expires after that.
local now = current_time()
if identity ~= '' then
  for _, old in ipairs(call('ZRANGEBYSCORE', IDENTITIES, '-inf', format_float(now), 'LIMIT', 0, max_count)) do
    call('ZREM', IDENTITIES, old)
  end
  call('ZADD', IDENTITIES, format_float(now + valid_s), identity)
  call('EXPIRE', IDENTITIES, math.ceil(valid_s))
end
return call('ZRANGEBYSCORE', IDENTITIES, format_float(now), '+inf', 'LIMIT', 0, max_count)
