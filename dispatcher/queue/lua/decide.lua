-- An operator labels or drains a version, or takes that back.
-- KEYS   WARM…
-- ARGV   the number of the key (LABELS or DRAINS), what begins the name of the one it is about, and the name (empty: take
--        it back)
-- Returns 1; 0 where there was none to take back; -1 where there are DECIDED_MOST others
-- Keeps: one of each is there at the most, whole or not at all.
local number, part, name = tonumber(ARGV[1]), ARGV[2], ARGV[3]
need('TYPE', 'TIME', 'ZADD', 'ZREM', 'ZCARD', 'ZSCORE', 'ZRANGE')
if not ours(number) then error({err = 'WRONGKEY ' .. problems[1]}) end
local set, before = KEYS[number], {}
for _, one in ipairs(call('ZRANGE', set, 0, -1)) do
  if begins(one, part) and one ~= name then before[#before + 1] = one end
end
if name == '' then
  remove(set, before)
  return math.min(#before, 1)
end
if #before == 0 and not call('ZSCORE', set, name) and call('ZCARD', set) >= DECIDED_MOST then return -1 end
call('ZADD', set, text(clock()), name)
remove(set, before)
return 1
