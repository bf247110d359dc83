-- Find unleased requests with a deadline between two times, as far as their scores contain one.
-- Uses: require_commands, common
-- Keys: queue
-- Arguments: after, until_at: number, range: number, offset: number, max_count: number, max_bytes: number,
--     max_member_bytes: number
-- `after` is exclusive and may be -inf. `until_at` is inclusive; empty means now. The search begins in `range` at
-- `offset`.
-- Returns {until, next range (-1: at the end), next offset, {range, location, member, last attempt, attempts, refusals,
--         blob}…}. If the first member and its blob have more than `max_bytes`, their length is returned in
--         place of the member, because they need a call of their own. Members above the largest are skipped.
-- Guarantees: only reads. The ranges are the priorities of each set that has unleased requests.
require_commands('ZCOUNT')
local SETS, LETTERS = {unpack(WAITING_SETS)}, {unpack(WAITING_LETTERS)}
SETS[#SETS + 1], LETTERS[#LETTERS + 1] = DELAYED_ORDER, 'D'
until_at = until_at or current_time()
local rows, count, size = {}, 0, 0

while range < PRIORITIES * #SETS do
  local key, letter = SETS[range % #SETS + 1], LETTERS[range % #SETS + 1]
  local base = math.floor(range / #SETS) * PRIORITY_STEP
  local low = after ~= '-inf' and '(' .. format_float(base + tonumber(after)) or base > 0 and format_float(base) or '-inf'
  -- Read by rank, because Redis walks to an offset of ZRANGEBYSCORE step by step.
  local start = 0
  if after ~= '-inf' then start = call('ZCOUNT', key, '-inf', string.sub(low, 2))
  elseif base > 0 then start = call('ZCOUNT', key, '-inf', '(' .. low) end
  local total = call('ZCOUNT', key, low, format_float(base + until_at))
  while offset < total do
    if count >= max_count then return {format_float(until_at), range, offset, unpack(rows)} end
    local name = call('ZRANGE', key, start + offset, start + offset)[1]
    local location, member_bytes, last_attempt, attempts, refusals = 'P', #name, '', 0, 0
    local blob, blob_bytes = '', 0
    if letter ~= 'P' then
      local id = tonumber(string.sub(name, -16))
      local state = load_entry(id)
      location, last_attempt = letter .. ':' .. id .. ':' .. state[MOVES], state[REASON] or ''
      attempts, refusals = state[ATTEMPTS], state[REFUSALS]
      member_bytes = call('HSTRLEN', MEMBERS, id)
      blob_bytes = get_blob_bytes(state)
      if member_bytes + blob_bytes <= max_bytes then
        name, blob = call('HGET', MEMBERS, id), load_blob(id, state, member_bytes, max_bytes)
      end
    end
    if member_bytes <= max_member_bytes then
      size = size + member_bytes + blob_bytes
      if count > 0 and size > max_bytes then return {format_float(until_at), range, offset, unpack(rows)} end
      if size > max_bytes then return {format_float(until_at), range, offset, {range, location, size}} end
      rows[#rows + 1] = {range, location, name, last_attempt, attempts, refusals, blob}
      count = count + 1
    end
    offset = offset + 1
  end
  range, offset = range + 1, 0
end
return {format_float(until_at), -1, 0, unpack(rows)}
