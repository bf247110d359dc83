-- Accept a dead request anew.
-- KEYS   own…
-- ARGV   id, score, member (with its new deadline), channel, then where it can be cancelled: request id, token, deadline
-- Returns 1, or 0 where it is not among the dead
-- Keeps: it leaves the dead exactly when it joins the line.
local id = ARGV[1]
need('ZSCORE', 'ZADD', 'ZREM', 'HDEL', 'GETRANGE', 'SET', 'DEL')
if not call('ZSCORE', DEAD, id) then return 0 end
call('ZADD', PENDING, ARGV[2], ARGV[3])
call('ZREM', DEAD, id)
call('ZREM', DEAD_AGE, string.format('%016d', id))
forget({id})
if ARGV[5] then mark(ARGV[5], ARGV[6], tonumber(ARGV[7]), clock()) end
redis.pcall('PUBLISH', ARGV[4], 'work')
return 1
