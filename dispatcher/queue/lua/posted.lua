-- Read the outbox in the order of its numbers, no more than so many bytes at once.
-- KEYS   the outbox
-- ARGV   after (exclusive, or -inf), most, bytes
-- Returns its elements; one at least where there is one, however large
-- Keeps: reads only.
local found, size, after = {}, 0, ARGV[1]
while #found < tonumber(ARGV[2]) and size < tonumber(ARGV[3]) do
  local one = redis.call('ZRANGEBYSCORE', KEYS[1], after, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  if not one[1] or #found > 0 and size + #one[1] > tonumber(ARGV[3]) then break end
  found[#found + 1], size, after = one[1], size + #one[1], '(' .. one[2]
end
return found
