-- Check which result lists cannot be pushed to, because the key has another type or this user may not write it.
-- Keys: PENDING
-- List lists: text
-- PENDING is the key by which a Cluster finds the node.
-- Returns for each list 1 if it cannot be pushed to, or 0
-- Guarantees: only reads.
local unusable = {}
for number, list in ipairs(lists) do
  local kind = redis.pcall('TYPE', list)
  local is_usable = not kind.err and (kind.ok == 'none' or kind.ok == 'list')
  if is_usable and redis.acl_check_cmd then is_usable = redis.acl_check_cmd('LPUSH', list, '') end
  unusable[number] = is_usable and 0 or 1
end
return unusable
