-- Accept a dead request anew.
-- KEYS   own…
-- ARGV   id, score, member (with its new deadline), channel
-- Returns 1, or 0 where it is not among the dead
-- Keeps: it leaves the dead exactly when it joins the line.
local id = ARGV[1]
need('ZSCORE', 'ZADD', 'ZREM', 'HDEL')
if not call('ZSCORE', DEAD, id) then return 0 end
call('ZADD', PENDING, ARGV[2], ARGV[3])
call('ZREM', DEAD, id)
call('ZREM', DEAD_AGE, string.format('%016d', id))
forget({id})
redis.pcall('PUBLISH', ARGV[4], 'work')
return 1
