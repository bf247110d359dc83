-- Read elements of the outbox in the order of their numbers.
-- Keys: OUTBOX
-- Arguments: after, max_count: number, max_bytes: number
-- `after` is the exclusive lower bound of the numbers, or -inf.
-- Returns the elements. The first one is returned however large it is.
-- Guarantees: only reads.
local found, size = {}, 0
while #found < max_count and size < max_bytes do
  local element = redis.call('ZRANGEBYSCORE', OUTBOX, after, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  if not element[1] or #found > 0 and size + #element[1] > max_bytes then break end
  found[#found + 1], size, after = element[1], size + #element[1], '(' .. element[2]
end
return found
