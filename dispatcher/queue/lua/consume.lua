-- Note that a program has consumed a result of a named stream, and forget the result.
-- KEYS   the stream's pending and consumed (streams.lua), keep, owner
-- ARGV   me, keep_s, request id, the number of its result in the keep (0: it has none)
-- Returns who has the name where that is another program, and then nothing was done; else an empty string
-- Keeps: an id is pending or consumed, with its result in the keep or without, in one step; a repeated call changes nothing.
local pending, consumed, keep, owner = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local call = redis.call
check_kind('hash', pending, consumed, keep)
check_kind('string', owner)
local holder = call('GETRANGE', owner, 0, 1023)
if holder ~= '' and holder ~= ARGV[1] then return holder end
need('HGET', 'HSET', 'HDEL', 'TTL', 'EXPIRE')
-- The first write removes nothing from nowhere, so that what comes after is whole or not at all (common.lua).
call('HDEL', pending, '')
local noted = call('HGET', pending, ARGV[3])
if noted then
  call('HSET', consumed, ARGV[3], string.match(noted, '%S*$'))
  call('HDEL', pending, ARGV[3])
end
call('HDEL', keep, ARGV[4])
keep_stream(pending, consumed, tonumber(ARGV[2]))
return ''
