-- Count the requests ahead of a request that waits in the queue.
-- Uses: require_commands, common
-- Keys: queue
-- Arguments: location, name
-- `name` is the member of the request, or its id if it was claimed before.
-- Returns the number, or false if the request is not there
-- Guarantees: only reads. Requests with a lower score are ahead. Of those with an equal score, only the ones of the
-- same set count.
require_commands('ZCOUNT', 'ZRANK')
local key, letter
for at, set in ipairs(WAITING_SETS) do
  if WAITING_NAMES[at] == location then key, letter = set, WAITING_LETTERS[at] end
end
if key ~= PENDING then
  local state = load_entry(tonumber(name))
  if not state or state[LOCATION] ~= letter then return false end
  name = ordered_name(tonumber(name), state)
end
local rank, score = call('ZRANK', key, name), call('ZSCORE', key, name)
if not rank then return false end
local ahead = rank
for _, other in ipairs(WAITING_SETS) do
  if other ~= key then ahead = ahead + call('ZCOUNT', other, '-inf', '(' .. score) end
end
return ahead
