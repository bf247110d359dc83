-- Record that a program has consumed a result of a named stream, and delete the result.
-- Uses: require_commands, named_streams
-- Keys: PENDING_IDS, CONSUMED_IDS, KEPT, OWNER
-- Arguments: client_id, record_ttl_s: number, request_id, kept_number
-- `kept_number` is the number of the kept result of the request, or 0.
-- Returns the client that owns the stream if that is another one, and then nothing was done; otherwise an empty
--         string
-- Guarantees: an id moves from pending to consumed, and its result is deleted, in one step. A repeated call changes
-- nothing.
local call = redis.call
check_type('hash', PENDING_IDS, CONSUMED_IDS, KEPT)
check_type('string', OWNER)
local holder = call('GETRANGE', OWNER, 0, 1023)
if holder ~= '' and holder ~= client_id then return holder end
require_commands('HGET', 'HSET', 'HDEL', 'TTL', 'EXPIRE')
-- The first write removes nothing: after it, Redis takes all writes or none (see `begin_writes` in common.lua).
call('HDEL', PENDING_IDS, '')
local record = call('HGET', PENDING_IDS, request_id)
if record then
  call('HSET', CONSUMED_IDS, request_id, string.match(record, '%S*$'))
  call('HDEL', PENDING_IDS, request_id)
end
call('HDEL', KEPT, kept_number)
set_stream_ttl(PENDING_IDS, CONSUMED_IDS, record_ttl_s)
return ''
