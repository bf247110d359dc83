-- Submit a dead request again.
-- KEYS   common keys…
-- ARGV   id, score, member (with its new deadline), channel, then, if it can be cancelled: request id, token,
--        deadline
-- Returns 1, or 0 if it is not among the dead requests
-- Guarantees: it leaves the dead-letter set exactly when it enters the queue.
local id = ARGV[1]
require_commands('ZSCORE', 'ZADD', 'ZREM', 'HDEL', 'GETRANGE', 'SET', 'DEL')
if not call('ZSCORE', DEAD, id) then return 0 end
call('ZADD', PENDING, ARGV[2], ARGV[3])
call('ZREM', DEAD, id)
call('ZREM', DEAD_AGE, string.format('%016d', id))
delete_entries({id})
if ARGV[5] then mark_active(ARGV[5], ARGV[6], tonumber(ARGV[7]), current_time()) end
redis.pcall('PUBLISH', ARGV[4], 'work')
return 1
