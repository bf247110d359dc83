-- Put requests in line and wake the dispatchers.
-- KEYS   own…, reply record, reply records of earlier calls that nobody will repeat…
-- ARGV   reply_s, channel, number of requests, then score, member…, then of those that can be cancelled: id, token,
--        deadline…
-- Returns the number of requests that were not pending already; the error QUEUEFULL if more than queue.max_pending would wait
-- Keeps: all or none (a full Redis refuses the first ZADD); a repeated call adds nothing, even if a
-- dispatcher took the request in between.
local REPLY = KEYS[OWN + 1]
local recorded = call('GET', REPLY)
if recorded then return tonumber(recorded) end
refuse_if_full(tonumber(ARGV[3]))
need('ZADD', 'SET', 'GETRANGE', 'DEL')
local added, chunk, last, now = 0, 2000, 3 + 2 * tonumber(ARGV[3]), clock()
for at = 4, last, chunk do
  added = added + call('ZADD', PENDING, unpack(ARGV, at, math.min(at + chunk - 1, last)))
end
for at = last + 1, #ARGV, 3 do mark(ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), now) end
call('SET', REPLY, added, 'EX', ARGV[1])
-- Last, so that a full Redis still sees the first ZADD as the first write.
for at = OWN + 2, #KEYS do call('DEL', KEYS[at]) end
redis.pcall('PUBLISH', ARGV[2], 'work')
return added
