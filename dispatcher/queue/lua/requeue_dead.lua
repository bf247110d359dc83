-- Submit a dead request again.
-- Uses: require_commands, common, cancel_markers
-- Keys: queue
-- Arguments: entry_id, score, member, channel, request_id, request_token, deadline: number
-- `member` has its new deadline. `request_id` is empty if the request cannot be cancelled.
-- Returns 1, or 0 if it is not among the dead requests
-- Guarantees: it leaves the dead-letter set exactly when it enters the queue. What features keep of it stays with it.
require_commands('ZSCORE', 'ZADD', 'ZREM', 'HDEL', 'HGET', 'HSET', 'GETRANGE', 'SET', 'DEL')
if not call('ZSCORE', DEAD, entry_id) then return 0 end
local item = {id = entry_id, state = load_entry(entry_id)}
features.call('before_writes', {item})
local store_kept = features.ask('keep', entry_id, item.state)
if store_kept then -- it enters the queue as a new entry, because a pending request has no place for what is kept
  local new_id = tonumber(call('HGET', CONTROL, 'next') or 0) + 1
  local new_state = {'', score, 0, 0, 0, 0, 0, '', '', string.sub(member, 1, PREFIX_BYTES)}
  call('HSET', CONTROL, 'next', new_id)
  call('HSET', MEMBERS, new_id, member)
  store_kept(new_id, new_state)
  return_to_queue(new_id, new_state)
else
  call('ZADD', PENDING, score, member)
end
call('ZREM', DEAD, entry_id)
call('ZREM', DEAD_AGE, string.format('%016d', entry_id))
delete_entries({item})
if request_id ~= '' then mark_active(request_id, request_token, deadline, current_time()) end
redis.pcall('PUBLISH', channel, 'work')
return 1
