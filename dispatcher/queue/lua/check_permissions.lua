-- Check what this user may do, without doing it.
-- KEYS   none
-- ARGV   for each command: the number of words, then the words
-- Returns 1 or 0 for each; nothing if the server cannot be asked (Redis before 7)
-- Guarantees: neither reads nor writes.
if not redis.acl_check_cmd then return {} end
local flags, at = {}, 1
while ARGV[at] do
  local count = tonumber(ARGV[at])
  flags[#flags + 1] = redis.acl_check_cmd(unpack(ARGV, at + 1, at + count)) and 1 or 0
  at = at + 1 + count
end
return flags
