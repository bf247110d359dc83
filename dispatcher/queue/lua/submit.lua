-- Submit requests and wake the dispatchers.
-- KEYS   common keys…, reply record, obsolete reply records of earlier calls…
-- ARGV   reply_s, channel, number of requests, then score, member…, then for each request that can be cancelled: id,
--        token, deadline…
-- Returns the number of requests that were not pending already; the error QUEUEFULL if more than queue.max_pending
--         would wait
-- Guarantees: submits all requests or none (a full Redis refuses the first ZADD). A repeated call adds nothing, even
-- if a dispatcher claimed the request in between.
local REPLY = KEYS[KEY_COUNT + 1]
local recorded = call('GET', REPLY)
if recorded then return tonumber(recorded) end
reject_if_full(tonumber(ARGV[3]))
require_commands('ZADD', 'SET', 'GETRANGE', 'DEL')
local added, batch_size, last, now = 0, 2000, 3 + 2 * tonumber(ARGV[3]), current_time()
for at = 4, last, batch_size do
  added = added + call('ZADD', PENDING, unpack(ARGV, at, math.min(at + batch_size - 1, last)))
end
for at = last + 1, #ARGV, 3 do mark_active(ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), now) end
call('SET', REPLY, added, 'EX', ARGV[1])
-- The obsolete records are deleted last, so that the ZADD is the first write, which a full Redis refuses.
for at = KEY_COUNT + 2, #KEYS do call('DEL', KEYS[at]) end
redis.pcall('PUBLISH', ARGV[2], 'work')
return added
