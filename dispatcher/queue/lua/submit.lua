-- Put requests in line and wake the dispatchers.
-- KEYS   own…, reply record
-- ARGV   reply_s, channel, then score, member…
-- Returns how many were not pending already
-- Keeps: all or none (a full Redis refuses the first ZADD); a repeated call adds nothing, even if a
-- dispatcher took the request in between.
local REPLY = KEYS[OWN + 1]
local recorded = call('GET', REPLY)
if recorded then return tonumber(recorded) end
need('ZADD', 'SET')
local added, chunk = 0, 2000
for at = 3, #ARGV, chunk do
  added = added + call('ZADD', PENDING, unpack(ARGV, at, math.min(at + chunk - 1, #ARGV)))
end
call('SET', REPLY, added, 'EX', ARGV[1])
redis.pcall('PUBLISH', ARGV[2], 'work')
return added
