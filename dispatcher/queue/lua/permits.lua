-- Ask what this user may do, and do none of it.
-- KEYS   none
-- ARGV   for each command: how many words, then the words
-- Returns 1 or 0 for each; nothing where the server cannot be asked (Redis before 7)
-- Keeps: reads nothing, writes nothing.
if not redis.acl_check_cmd then return {} end
local told, at = {}, 1
while ARGV[at] do
  local count = tonumber(ARGV[at])
  told[#told + 1] = redis.acl_check_cmd(unpack(ARGV, at + 1, at + count)) and 1 or 0
  at = at + 1 + count
end
return told
