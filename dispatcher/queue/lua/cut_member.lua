-- Cut a member that could not be transferred to the owner of its lease to its beginning.
-- Uses: require_commands, common
-- Keys: queue
-- Arguments: entry_id: number, token
-- Returns what is left of the member, or false if the lease is not the caller's
-- Guarantees: the request stays where it is.
require_commands('HSET')
if not load_leased(entry_id, token) then return false end
local member = cut_member(call('HGET', MEMBERS, entry_id), KEPT_BYTES)
call('HSET', MEMBERS, entry_id, member)
return member
