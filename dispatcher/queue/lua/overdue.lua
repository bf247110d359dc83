-- Find unleased requests whose score tells a deadline between two times.
-- KEYS   own…
-- ARGV   after (exclusive, or -inf), until (inclusive; empty: now), range to start in, offset there, most, bytes,
--        bytes of the largest member that is moved
-- Returns {until, next range (-1: at the end), next offset, {range, place, member, last try, attempts, refusals}…}; where the first has more
--        than `bytes`, how many in its place: it wants a call of its own. Those above the largest are passed over.
-- Keeps: reads only. The ranges are the priorities of each of the sets that hold unleased requests.
need('ZCOUNT')
local SETS, LETTERS = {unpack(WAITING)}, {unpack(WAITING_LETTERS)}
SETS[#SETS + 1], LETTERS[#LETTERS + 1] = DELAYED_ORDER, 'D'
local after, last = ARGV[1], tonumber(ARGV[2]) or clock()
local range, offset, most, bytes = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local largest = tonumber(ARGV[7])
local found, count, size = {}, 0, 0

while range < PRIORITIES * #SETS do
  local key, letter = SETS[range % #SETS + 1], LETTERS[range % #SETS + 1]
  local base = math.floor(range / #SETS) * PRIORITY_STEP
  local low = after ~= '-inf' and '(' .. text(base + tonumber(after)) or base > 0 and text(base) or '-inf'
  -- By rank, because Redis walks to an offset.
  local start = 0
  if after ~= '-inf' then start = call('ZCOUNT', key, '-inf', string.sub(low, 2))
  elseif base > 0 then start = call('ZCOUNT', key, '-inf', '(' .. low) end
  local total = call('ZCOUNT', key, low, text(base + last))
  while offset < total do
    if count >= most then return {text(last), range, offset, unpack(found)} end
    local name = call('ZRANGE', key, start + offset, start + offset)[1]
    local place, own, last_try, attempts, refusals = 'P', #name, '', 0, 0
    if letter ~= 'P' then
      local id = tonumber(string.sub(name, -16))
      local state = load(id)
      place, last_try = letter .. ':' .. id .. ':' .. state[MOVES], state[REASON] or ''
      attempts, refusals = state[ATTEMPTS], state[REFUSALS]
      own = call('HSTRLEN', MEMBERS, id)
      name = own <= bytes and call('HGET', MEMBERS, id)
    end
    if own <= largest then
      size = size + own
      if count > 0 and size > bytes then return {text(last), range, offset, unpack(found)} end
      if size > bytes then return {text(last), range, offset, {range, place, own}} end
      found[#found + 1] = {range, place, name, last_try, attempts, refusals}
      count = count + 1
    end
    offset = offset + 1
  end
  range, offset = range + 1, 0
end
return {text(last), -1, 0, unpack(found)}
