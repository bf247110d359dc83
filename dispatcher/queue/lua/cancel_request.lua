-- Mark requests as cancelled, and wake the dispatchers.
-- Uses: require_commands, common, cancel_markers
-- Keys: queue
-- Arguments: channel, ttl_s: number, request_id, request_token, foreign_token
-- An empty `request_token` means all tokens that are active under the id. `foreign_token` is what a producer of llm-d
-- has left under request-active:<id>, or empty.
-- Returns the number of marked requests
-- Guarantees: only requests that carry a marked token are cancelled, and only those of this queue.
local now, tokens, count = current_time(), load_active_tokens(request_id), 0
require_commands('SET')
if foreign_token ~= '' and not tokens[foreign_token] then tokens[foreign_token] = now + ttl_s end
for token, deadline in pairs(tokens) do
  if (request_token == '' or request_token == token) and deadline > now then
    call('SET', cancel_key(request_id, token), token, 'EX', math.ceil(deadline - now))
    count = count + 1
  end
end
if count > 0 then redis.pcall('PUBLISH', channel, 'cancel') end
return count
