-- Submit a dead request again.
-- Uses: require_commands, common, cancel_markers
-- Keys: queue
-- Arguments: entry_id, score, member, channel, request_id, request_token, deadline: number
-- `member` has its new deadline. `request_id` is empty if the request cannot be cancelled.
-- Returns 1, or 0 if it is not among the dead requests
-- Guarantees: it leaves the dead-letter set exactly when it enters the queue.
require_commands('ZSCORE', 'ZADD', 'ZREM', 'HDEL', 'GETRANGE', 'SET', 'DEL')
if not call('ZSCORE', DEAD, entry_id) then return 0 end
call('ZADD', PENDING, score, member)
call('ZREM', DEAD, entry_id)
call('ZREM', DEAD_AGE, string.format('%016d', entry_id))
delete_entries({entry_id})
if request_id ~= '' then mark_active(request_id, request_token, deadline, current_time()) end
redis.pcall('PUBLISH', channel, 'work')
return 1
