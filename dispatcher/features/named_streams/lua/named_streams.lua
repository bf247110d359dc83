-- The record of a named stream, in two hashes by request id:
--   <prefix>:streams:<name>:pending    submitted and not yet consumed: token, deadline and digest, separated by spaces
--   <prefix>:streams:<name>:consumed   consumed: the digest
-- The digest is that of path and body. An id is in at most one of the two.

local function check_type(kind, ...)
  for _, key in ipairs({...}) do
    local actual = redis.call('TYPE', key).ok
    if actual ~= 'none' and actual ~= kind then
      error({err = 'WRONGKEY ' .. key .. ' holds a ' .. actual .. ', not a ' .. kind})
    end
  end
end

-- Let both hashes live equally long, and never shorter than before. An id that only one of them forgot would be
-- submitted again.
local function set_stream_ttl(pending, consumed, ttl_s)
  ttl_s = math.max(ttl_s, redis.call('TTL', pending), redis.call('TTL', consumed))
  for _, key in ipairs({pending, consumed}) do redis.call('EXPIRE', key, ttl_s) end
end
