-- Record that a program has consumed a result of a named stream, and delete the result.
-- KEYS   the stream's pending and consumed hashes (named_streams.lua), kept results, owner
-- ARGV   client id, lifetime of the record in seconds, request id, number of its kept result (0: none)
-- Returns the client that owns the stream if that is another one, and then nothing was done; otherwise an empty
--         string
-- Guarantees: an id moves from pending to consumed, and its result is deleted, in one step. A repeated call changes
-- nothing.
local pending, consumed, kept, owner = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local call = redis.call
check_type('hash', pending, consumed, kept)
check_type('string', owner)
local holder = call('GETRANGE', owner, 0, 1023)
if holder ~= '' and holder ~= ARGV[1] then return holder end
require_commands('HGET', 'HSET', 'HDEL', 'TTL', 'EXPIRE')
-- The first write removes nothing: after it, Redis takes all writes or none (see `begin_writes` in common.lua).
call('HDEL', pending, '')
local record = call('HGET', pending, ARGV[3])
if record then
  call('HSET', consumed, ARGV[3], string.match(record, '%S*$'))
  call('HDEL', pending, ARGV[3])
end
call('HDEL', kept, ARGV[4])
set_stream_ttl(pending, consumed, tonumber(ARGV[2]))
return ''
