-- Cut a member that could not be transferred to the owner of its lease to its beginning.
-- KEYS   common keys…
-- ARGV   id, token
-- Returns what is left of the member, or false if the lease is not the caller's
-- Guarantees: the request stays where it is.
local id = tonumber(ARGV[1])
require_commands('HSET')
if not load_leased(id, ARGV[2]) then return false end
local member = cut_member(call('HGET', MEMBERS, id), KEPT_BYTES)
call('HSET', MEMBERS, id, member)
return member
