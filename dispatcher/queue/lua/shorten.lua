-- Keep no more than the head of a member that did not get through to who leased it.
-- KEYS   own…
-- ARGV   id, token
-- Returns what is left of it, or false where the lease is not the caller's
-- Keeps: the request stays where it is.
local id = tonumber(ARGV[1])
need('HSET')
if not held(id, ARGV[2]) then return false end
local member = shortened(call('HGET', MEMBERS, id), HEAD_BYTES)
call('HSET', MEMBERS, id, member)
return member
