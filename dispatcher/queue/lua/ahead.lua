-- How many lie before a request that waits in line.
-- KEYS   own…
-- ARGV   the name of its place, its member or its id
-- Returns how many, or false where it does not lie there
-- Keeps: reads only. A better score goes first; of equal ones those of its own set count that lie before it.
need('ZCOUNT', 'ZRANK')
local key, letter, name = nil, nil, ARGV[2]
for at, set in ipairs(WAITING) do
  if WAITING_NAMES[at] == ARGV[1] then key, letter = set, WAITING_LETTERS[at] end
end
if key ~= PENDING then
  local state = load(tonumber(name))
  if not state or state[WHERE] ~= letter then return false end
  name = name_in_order(tonumber(name), state)
end
local rank, score = call('ZRANK', key, name), call('ZSCORE', key, name)
if not rank then return false end
local ahead = rank
for _, other in ipairs(WAITING) do
  if other ~= key then ahead = ahead + call('ZCOUNT', other, '-inf', '(' .. score) end
end
return ahead
