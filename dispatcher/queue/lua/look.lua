-- Look at requests where they lie, a page at a time.
-- KEYS   own…
-- ARGV   how: "rank" (in the order of one set), "near" (requests with the tokens that are active under the id, looked up by
--        their deadlines; then all leases; then, until each of those tokens is found, all requests with those deadlines),
--        "entries" (all that were claimed once), "pending" (all that were never claimed); the set's name, or the
--        id; where to begin (a rank, a range and a rank, a cursor: two arguments); most, bytes, bytes of the largest
--        member that is told whole; then for each word how many spellings, and these: a member must hold one of each word
-- Returns {next range (-1: at the end), next offset, looked at, bytes of these, 0, or 1: they are too many, ask for fewer,
--         {name of its place, id or 0, score, member, deliveries, attempts, refusals, deaths, units, owner, time or false, reason,
--         the model that it waits for or ''}…}
-- Keeps: reads only, no more than `most` requests. What lies there all the while is found by "entries" and "pending".
need('ZCOUNT', 'ZSCAN', 'HSCAN')
local how, which, range, offset = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local most, bytes, largest = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local SETS, NAMES, near = {D = DELAYED, L = LEASES, X = DEAD}, {}, {}
for at, set in ipairs(WAITING) do
  SETS[WAITING_NAMES[at]], NAMES[WAITING_LETTERS[at]] = set, WAITING_NAMES[at]
  near[at] = {set, WAITING_LETTERS[at]}
end
near[#near + 1] = {DELAYED_ORDER, 'D'}
local words, at = {}, 8
while ARGV[at] do
  local count = tonumber(ARGV[at])
  words[#words + 1] = {unpack(ARGV, at + 1, at + count)}
  at = at + 1 + count
end

local function fits(member)
  for _, word in ipairs(words) do
    local found = false
    for _, spelling in ipairs(word) do found = found or string.find(member, spelling, 1, true) ~= nil end
    if not found then return false end
  end
  return true
end

local rows, looked, size, told = {}, 0, 0, 0

-- False: the page was full before it.
local function tell(letter, id, score, member, state, time)
  looked, size = looked + 1, size + #member
  if not fits(member) then return true end
  if #rows > 0 and told + math.min(#member, largest) > bytes then
    looked, size = looked - 1, size - #member
    return false
  end
  told = told + math.min(#member, largest)
  rows[#rows + 1] = {NAMES[letter] or letter, id, score, shortened(member, largest), state[DELIVERIES] or 0, state[ATTEMPTS] or 0,
                     state[REFUSALS] or 0, state[DEATHS] or 0, units_of(state), state[OWNER] or '', time,
                     state[REASON] or '', state[AWAITS] and state[AWAITS][1] or ''}
  return true
end

local function time_of(letter, id, state)
  if letter == 'L' then
    return call('ZSCORE', LEASES, lease_name(id, state)) or call('ZSCORE', LEASES, abandoned_name(id, state[OWNER]))
  end
  if letter == 'D' then return call('ZSCORE', DELAYED, string.format('%016d', id)) end
  return letter == 'X' and state[DIED]
end

-- An entry that is not of this line (a lease of another one's) is passed over.
local function tell_entry(id)
  local state = load(id)
  local member = state and call('HGET', MEMBERS, id)
  if not member then return true end
  return tell(state[WHERE], id, state[SCORE], member, state, time_of(state[WHERE], id, state))
end

local function tell_named(letter, name, score)
  if letter == 'P' then return tell('P', 0, score, name, {}, false) end
  if letter ~= 'L' and letter ~= 'X' then name = string.sub(name, -16) end
  return tell_entry(tonumber(string.match(name, '^%d+')))
end

-- From a rank on; how far it came, and whether that is the end.
local function walk(key, letter, first, last)
  for rank = first, last do
    if looked >= most or size > 8 * bytes then return rank, false end
    local one = call('ZRANGE', key, rank, rank, 'WITHSCORES')
    if not one[1] then break end
    if not tell_named(letter, one[1], one[2]) then return rank, false end
  end
  return last + 1, true
end

local function reply(next_range, next_offset, again)
  return {next_range, next_offset, looked, size, again or 0, rows}
end

if how == 'rank' then
  local rank, ended = walk(SETS[which], which, tonumber(offset), call('ZCARD', SETS[which]) - 1)
  return reply(ended and -1 or 0, tostring(rank))
end

if how == 'near' then
  -- Range 0 looks up the tokens, and then reads all leases. Ranges from 1 on are bands of equal deadlines, which may be long.
  local tokens, count, seen, deadlines = active(which), 0, {}, {}
  for _ in pairs(tokens) do count = count + 1 end

  -- Returns whether this page has a request for each token that is active under the id.
  local function all_told()
    for token in pairs(tokens) do
      local found = false
      for _, row in ipairs(rows) do found = found or string.find(row[4], token, 1, true) ~= nil end
      if not found then return false end
    end
    return count > 0
  end

  -- Compares bytes, because Redis sorts by bytes and `<` compares by the locale.
  local function is_before(one, text)
    for at = 1, #text do
      local mine, theirs = string.byte(one, at), string.byte(text, at)
      if mine ~= theirs then return not mine or mine < theirs end
    end
    return false
  end

  -- Requests of one score are sorted by their bytes, and a member begins with its token, in the form of our client
  -- (core/requests/request.py) or of the queue contract. So a binary search among a million requests takes some twenty reads.
  local function tell_beginning(key, letter, score, text)
    local first = call('ZCOUNT', key, '-inf', '(' .. score)
    local low, high = first, first + call('ZCOUNT', key, score, score)
    local last = high
    while low < high do
      local middle = math.floor((low + high) / 2)
      if is_before(call('ZRANGE', key, middle, middle)[1], text) then low = middle + 1 else high = middle end
    end
    local one = low < last and call('ZRANGE', key, low, low, 'WITHSCORES')
    if one and string.sub(one[1], 1, #text) == text then tell_named(letter, one[1], one[2]) end
  end

  if range == 0 and offset == '0' and count <= TOKENS_SOUGHT then
    for token, deadline in pairs(tokens) do
      for priority = 0, PRIORITIES - 1 do
        local score = string.format('%.0f', priority * PRIORITY_STEP + math.floor(deadline))
        for _, place in ipairs(near) do
          for _, start in ipairs({'{"internal":{"retry_count":0,', '{"internal":{'}) do
            tell_beginning(place[1], place[2], score, start .. '"request_token":"' .. token .. '"')
          end
        end
      end
    end
    if all_told() then return reply(-1, '0') end
  end
  for _, deadline in pairs(tokens) do
    deadline = math.floor(deadline)
    if not seen[deadline] then
      seen[deadline] = true
      deadlines[#deadlines + 1] = deadline
    end
  end
  table.sort(deadlines)
  local rank = tonumber(offset)
  if range == 0 then
    local came, ended = walk(LEASES, 'L', rank, call('ZCARD', LEASES) - 1)
    if not ended then return reply(0, tostring(came)) end
    if all_told() then return reply(-1, '0') end
    range, rank = 1, 0
  end
  local last = #deadlines * PRIORITIES * #near
  while range <= last do
    local key, letter = unpack(near[(range - 1) % #near + 1])
    local band = math.floor((range - 1) / #near)
    local low = (band % PRIORITIES) * PRIORITY_STEP + deadlines[math.floor(band / PRIORITIES) + 1]
    local from, to = string.format('%.0f', low), '(' .. string.format('%.0f', low + 1)
    local count = call('ZCOUNT', key, from, to)
    if rank < count then
      local first = call('ZCOUNT', key, '-inf', '(' .. from)
      local came, ended = walk(key, letter, first + rank, first + count - 1)
      if not ended then return reply(range, tostring(came - first)) end
    end
    range, rank = range + 1, 0
  end
  return reply(-1, '0')
end

-- A cursor's page cannot be left half way: where it holds too much, the caller asks for fewer from the same one.
local found
if how == 'pending' then found = call('ZSCAN', PENDING, offset, 'COUNT', most)
else found = call('HSCAN', ENTRIES, offset, 'COUNT', most) end
local items = found[2]
for number = 1, #items, 2 do
  local whole
  if how == 'pending' then whole = tell_named('P', items[number], items[number + 1])
  else whole = tell_entry(tonumber(items[number])) end
  if not whole then
    if most > 1 then
      rows = {}
      return reply(0, offset, 1)
    end
    bytes = math.huge -- one bucket: whatever it holds
    if how == 'pending' then tell_named('P', items[number], items[number + 1])
    else tell_entry(tonumber(items[number])) end
  end
end
return reply(found[1] == '0' and -1 or 0, found[1])
