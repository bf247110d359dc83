-- Read elements of the outbox in the order of their numbers, up to a number of bytes.
-- KEYS   the outbox
-- ARGV   number after which to begin (or -inf), largest number of elements, largest number of bytes
-- Returns the elements. The first one is returned however large it is.
-- Keeps: only reads.
local found, size, after = {}, 0, ARGV[1]
while #found < tonumber(ARGV[2]) and size < tonumber(ARGV[3]) do
  local one = redis.call('ZRANGEBYSCORE', KEYS[1], after, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  if not one[1] or #found > 0 and size + #one[1] > tonumber(ARGV[3]) then break end
  found[#found + 1], size, after = one[1], size + #one[1], '(' .. one[2]
end
return found
