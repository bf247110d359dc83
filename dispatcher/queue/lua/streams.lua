-- Notes about a named stream, in two hashes by request id:
--   <prefix>:streams:<name>:pending    submitted and not consumed: token, deadline and digest, with spaces between
--   <prefix>:streams:<name>:consumed   consumed: the digest
-- The digest is that of path and body. An id is in one of the two at most.

local function check_kind(kind, ...)
  for _, key in ipairs({...}) do
    local found = redis.call('TYPE', key).ok
    if found ~= 'none' and found ~= kind then
      error({err = 'WRONGKEY ' .. key .. ' holds a ' .. found .. ', not a ' .. kind})
    end
  end
end

-- Both live equally long, and never shorter than before: an id that only one of them forgot would be submitted again.
local function keep_stream(pending, consumed, ttl_s)
  ttl_s = math.max(ttl_s, redis.call('TTL', pending), redis.call('TTL', consumed))
  for _, key in ipairs({pending, consumed}) do redis.call('EXPIRE', key, ttl_s) end
end
