-- Label or drain a version for an operator, or undo that.
-- KEYS   WARM_MARKERS…
-- ARGV   the number of the key (LABELS or DRAINS), the beginning of the names that this one replaces, and the name
--        (empty: only remove the previous one)
-- Returns 1; 0 if there was none to remove; -1 if there are MAX_LABELS_OR_DRAINS others
-- Guarantees: there is at most one label or drain of each name, changed as a whole or not at all.
local key_number, prefix, name = tonumber(ARGV[1]), ARGV[2], ARGV[3]
require_commands('TYPE', 'TIME', 'ZADD', 'ZREM', 'ZCARD', 'ZSCORE', 'ZRANGE')
if not is_own_key(key_number) then error({err = 'WRONGKEY ' .. problems[1]}) end
local set, previous = KEYS[key_number], {}
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
