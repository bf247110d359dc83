-- Check which result lists cannot be pushed to, because the key has another type or this user may not write it.
-- KEYS   the queue, by which a Cluster finds the node
-- ARGV   the lists
-- Returns for each list 1 if it cannot be pushed to, or 0
-- Guarantees: only reads.
local unusable = {}
for at, list in ipairs(ARGV) do
  local kind = redis.pcall('TYPE', list)
  local is_usable = not kind.err and (kind.ok == 'none' or kind.ok == 'list')
  if is_usable and redis.acl_check_cmd then is_usable = redis.acl_check_cmd('LPUSH', list, '') end
  unusable[at] = is_usable and 0 or 1
end
return unusable
