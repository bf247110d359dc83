-- Count the requests that wait for their model.
-- KEYS   own…
-- ARGV   nothing
-- Returns {model, how many…}: of AWAITED_MOST models at the most, of others with each call where there are more
-- Keeps: reads only.
local known = call('ZCARD', ABSENT_COUNTS)
local first = known > AWAITED_MOST and tonumber(call('TIME')[2]) % known or 0
local found = call('ZRANGE', ABSENT_COUNTS, first, first + AWAITED_MOST - 1, 'WITHSCORES')
local left = first + AWAITED_MOST - known -- it goes on from the beginning
if first > 0 and left > 0 then
  for _, value in ipairs(call('ZRANGE', ABSENT_COUNTS, 0, left - 1, 'WITHSCORES')) do found[#found + 1] = value end
end
return found
