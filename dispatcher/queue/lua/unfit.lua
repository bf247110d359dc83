-- Which of some result lists cannot be pushed to: keys of another kind, or not for this user.
-- KEYS   the queue, for a Cluster finds the node by it
-- ARGV   the lists
-- Returns for each 1: it is unfit; or 0
-- Keeps: reads only.
local unfit = {}
for at, list in ipairs(ARGV) do
  local found = redis.pcall('TYPE', list)
  local fit = not found.err and (found.ok == 'none' or found.ok == 'list')
  if fit and redis.acl_check_cmd then fit = redis.acl_check_cmd('LPUSH', list, '') end
  unfit[at] = fit and 0 or 1
end
return unfit
