-- Count the requests ahead of a request that waits in the queue.
-- Uses: require_commands, common
-- Keys: queue
-- Arguments: location, name
-- `name` is the member of the request, or its id if it was claimed before.
-- Returns the number, or false if the request is not there
-- Guarantees: only reads. Requests with a lower score are ahead. Of those with an equal score, only the ones of the
-- same set count. Entries of a lane with `goes_first` are ahead of all others of their priority.
require_commands('ZCOUNT', 'ZRANK')
local key, letter, goes_first
for at, set in ipairs(WAITING_SETS) do
  if WAITING_LETTERS[at] == location then
    key, letter, goes_first = set, WAITING_LETTERS[at], LANES[at - 2] and LANES[at - 2].goes_first
  end
end
if key ~= PENDING then
  local state = load_entry(tonumber(name))
  if not state or state[LOCATION] ~= letter then return false end
  name = ordered_name(tonumber(name), state)
end
local rank, score = call('ZRANK', key, name), call('ZSCORE', key, name)
if not rank then return false end
-- Scores below these bounds are ahead: in sets whose entries go first, up to the end of the priority of the request.
local value, below, below_first = parse_score(score), '(' .. score, '(' .. score
local first_of_priority = math.min(value, math.floor(value / PRIORITY_STEP) * PRIORITY_STEP)
if goes_first then
  below = '(' .. string.format('%.17g', first_of_priority)
else
  local first_of_next = (math.floor(value / PRIORITY_STEP) + 1) * PRIORITY_STEP
  below_first = first_of_next > value and '(' .. string.format('%.17g', first_of_next) or score
end
local ahead = rank
for at, other in ipairs(WAITING_SETS) do
  if other ~= key then
    local lane = LANES[at - 2]
    ahead = ahead + call('ZCOUNT', other, '-inf', lane and lane.goes_first and below_first or below)
  end
end
return ahead
