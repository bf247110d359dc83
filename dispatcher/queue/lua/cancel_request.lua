-- Mark requests as cancelled, and wake the dispatchers.
-- KEYS   common keys…
-- ARGV   channel, ttl_s, request id, its token (empty: all that are active under the id), the token that a producer
--        of llm-d has left under request-active:<id> (or empty)
-- Returns the number of marked requests
-- Guarantees: only requests that carry a marked token are cancelled, and only those of this queue.
local now, token_filter, foreign_token = current_time(), ARGV[4], ARGV[5]
local tokens, count = load_active_tokens(ARGV[3]), 0
require_commands('SET')
if foreign_token ~= '' and not tokens[foreign_token] then tokens[foreign_token] = now + tonumber(ARGV[2]) end
for token, deadline in pairs(tokens) do
  if (token_filter == '' or token_filter == token) and deadline > now then
    call('SET', cancel_key(ARGV[3], token), token, 'EX', math.ceil(deadline - now))
    count = count + 1
  end
end
if count > 0 then redis.pcall('PUBLISH', ARGV[1], 'cancel') end
return count
