-- Read elements of the outbox in the order of their numbers.
-- KEYS   the outbox
-- ARGV   the number after which to begin (or -inf), max count, max bytes
-- Returns the elements. The first one is returned however large it is.
-- Guarantees: only reads.
local found, size, after = {}, 0, ARGV[1]
while #found < tonumber(ARGV[2]) and size < tonumber(ARGV[3]) do
  local element = redis.call('ZRANGEBYSCORE', KEYS[1], after, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  if not element[1] or #found > 0 and size + #element[1] > tonumber(ARGV[3]) then break end
  found[#found + 1], size, after = element[1], size + #element[1], '(' .. element[2]
end
return found
