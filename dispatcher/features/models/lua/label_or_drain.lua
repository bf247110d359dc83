-- Label or drain a version for an operator, or undo that.
-- Uses: require_commands, time, model_registry
-- Keys: models
-- Arguments: kind, prefix, name
-- `kind` is labels or drains. `name` replaces the names that begin with `prefix`; an empty one only removes them.
-- Returns 1; 0 if there was none to remove; -1 if there are MAX_LABELS_OR_DRAINS others
-- Guarantees: there is at most one label or drain of each name, changed as a whole or not at all.
local set, previous = kind == 'labels' and LABELS or DRAINS, {}
require_commands('TYPE', 'TIME', 'ZADD', 'ZREM', 'ZCARD', 'ZSCORE', 'ZRANGE')
if not is_own_key(set) then error({err = 'WRONGKEY ' .. problems[1]}) end
for _, entry in ipairs(call('ZRANGE', set, 0, -1)) do
  if starts_with(entry, prefix) and entry ~= name then previous[#previous + 1] = entry end
end
if name == '' then
  remove_members(set, previous)
  return math.min(#previous, 1)
end
if #previous == 0 and not call('ZSCORE', set, name) and call('ZCARD', set) >= MAX_LABELS_OR_DRAINS then return -1 end
call('ZADD', set, format_float(current_time()), name)
remove_members(set, previous)
return 1
