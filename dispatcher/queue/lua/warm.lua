-- Take the right to warm a version at an endpoint, or renew it; or give it back, with or without the mark that it is warm.
-- KEYS   WARM…
-- ARGV   take, warm or back; the version and endpoint as they stand in WARM; as names in WARMING begin with them; and as
--        the owner's own stands there
-- Returns 1, or 0 where another owner has the right, or another program's key stands in the way
-- Keeps: one owner at a time has it, and each for WARMING_S from when it was taken or renewed.
local what, pair, part, mine = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
need('TYPE', 'TIME', 'EXPIRE', 'ZADD', 'ZREM', 'ZRANGE', 'ZRANGEBYSCORE')
local now, free = clock(), ours(2)
if free then lapse(WARMING, now, WARMING_S) end
if what == 'take' then
  if not free then return 0 end
  for _, name in ipairs(call('ZRANGE', WARMING, 0, -1)) do
    if name ~= mine and begins(name, part) then return 0 end
  end
  hold_for(WARMING, now, WARMING_S, {mine})
  return 1
end
if free then call('ZREM', WARMING, mine) end
if what == 'warm' and ours(1) then hold_for(WARM, now, WARM_S, {pair}) end
return 1
