-- How many lie before a request that waits in line.
-- KEYS   own…
-- ARGV   the letter of its set, its member or its id
-- Returns how many, or false where it does not lie there
-- Keeps: reads only. A better score goes first; of equal ones those of its own set count that lie before it.
need('ZCOUNT', 'ZRANK')
local SETS = {P = PENDING, R = RETURNED, S = SUSPECTS}
local key, name = SETS[ARGV[1]], ARGV[2]
if ARGV[1] ~= 'P' then
  local state = load(tonumber(name))
  if not state or state[WHERE] ~= ARGV[1] then return false end
  name = name_in_order(tonumber(name), state)
end
local rank, score = call('ZRANK', key, name), call('ZSCORE', key, name)
if not rank then return false end
local ahead = rank
for _, other in ipairs({PENDING, RETURNED, SUSPECTS}) do
  if other ~= key then ahead = ahead + call('ZCOUNT', other, '-inf', '(' .. score) end
end
return ahead
