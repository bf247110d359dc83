-- Ask for requests to be cancelled, and wake the dispatchers.
-- KEYS   own…
-- ARGV   channel, ttl_s, request id, its token (empty: whoever is active under the id), the token that a producer of
--        llm-d has left under request-active:<id> (or empty)
-- Returns how many are active
-- Keeps: only a request that carries the token is cancelled, and only of this queue.
local now, wanted, theirs = clock(), ARGV[4], ARGV[5]
local tokens, count = active(ARGV[3]), 0
need('SET')
if theirs ~= '' and not tokens[theirs] then tokens[theirs] = now + tonumber(ARGV[2]) end
for token, deadline in pairs(tokens) do
  if (wanted == '' or wanted == token) and deadline > now then
    call('SET', cancel_key(ARGV[3], token), token, 'EX', math.ceil(deadline - now))
    count = count + 1
  end
end
if count > 0 then redis.pcall('PUBLISH', ARGV[1], 'cancel') end
return count
