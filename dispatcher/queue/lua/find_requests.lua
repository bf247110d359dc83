-- Read requests where they are stored, a page at a time.
-- Uses: require_commands, common, cancel_markers
-- Keys: queue
-- Arguments: mode, target, range: number, offset, max_count: number, max_bytes: number, max_member_bytes: number
-- List spellings: term: number, text
-- A member matches if it contains a spelling of each search term; terms are numbered from 1 on. The page begins at
-- `range` and `offset`.
--   mode "rank":    one set in its order; the target is the letter of the set; the offset is a rank
--   mode "near":    the target is an id. First the requests with the tokens that are active under it, looked up by their
--                   deadlines; then all leases; then, until each token is found, all requests with these deadlines; the
--                   offset is a rank
--   mode "entries": all requests that were claimed at least once; the offset is a cursor
--   mode "pending": all requests that were never claimed; the offset is a cursor
-- Returns {next range (-1: at the end), next offset, number of examined requests, their bytes, 0 or 1 (1: the page is
--         too large, ask for fewer requests), {letter of the location, id or 0, score, member, deliveries, attempts,
--         refusals, deaths, units, owner, time or false, reason, the name of what it waits for or ''}…}
-- Guarantees: only reads, and reads no more than `max_count` requests. A request that stays where it is all the while
-- is found by "entries" and "pending".
require_commands('ZCOUNT', 'ZSCAN', 'HSCAN')
local SETS, token_sets = {D = DELAYED, L = LEASES, X = DEAD}, {}
for at, set in ipairs(WAITING_SETS) do
  SETS[WAITING_LETTERS[at]] = set
  token_sets[at] = {set, WAITING_LETTERS[at]}
end
token_sets[#token_sets + 1] = {DELAYED_ORDER, 'D'}
local term_count = #spellings > 0 and spellings[#spellings].term or 0

local function matches_terms(member)
  local found_count = 0
  for _, spelling in ipairs(spellings) do -- the spellings of a term follow each other
    if spelling.term == found_count + 1 and string.find(member, spelling.text, 1, true) then
      found_count = found_count + 1
    end
  end
  return found_count == term_count
end

local rows, examined, examined_bytes, reply_bytes = {}, 0, 0, 0

-- Add a row for a request that matches. Return false if the page was full before it.
local function add_row(letter, id, score, member, state, time)
  examined, examined_bytes = examined + 1, examined_bytes + #member
  if not matches_terms(member) then return true end
  if #rows > 0 and reply_bytes + math.min(#member, max_member_bytes) > max_bytes then
    examined, examined_bytes = examined - 1, examined_bytes - #member
    return false
  end
  reply_bytes = reply_bytes + math.min(#member, max_member_bytes)
  rows[#rows + 1] = {
    letter, id, score, cut_member(member, max_member_bytes), state[DELIVERIES] or 0,
    state[ATTEMPTS] or 0, state[REFUSALS] or 0, state[DEATHS] or 0, get_units(state), state[OWNER] or '', time,
    state[REASON] or '', features.ask('waits_for', state) or '',
  }
  return true
end

local function get_entry_time(letter, id, state)
  if letter == 'L' then
    return call('ZSCORE', LEASES, lease_name(id, state)) or call('ZSCORE', LEASES, abandoned_lease_name(id, state[OWNER]))
  end
  if letter == 'D' then return call('ZSCORE', DELAYED, string.format('%016d', id)) end
  return letter == 'X' and state[DIED_AT]
end

-- Add a row for an entry. The entry of a lease of another queue is skipped, because its state and member are not
-- here.
local function add_entry_row(id)
  local state = load_entry(id)
  local member = state and call('HGET', MEMBERS, id)
  if not member then return true end
  return add_row(state[LOCATION], id, state[SCORE], member, state, get_entry_time(state[LOCATION], id, state))
end

local function add_named_row(letter, name, score)
  if letter == 'P' then return add_row('P', 0, score, name, {}, false) end
  if letter ~= 'L' and letter ~= 'X' then name = string.sub(name, -16) end
  return add_entry_row(tonumber(string.match(name, '^%d+')))
end

-- Read a set from one rank on. Return the next rank, and whether the end was reached.
local function read_ranks(key, letter, first, last)
  for rank = first, last do
    if examined >= max_count or examined_bytes > 8 * max_bytes then return rank, false end
    local row = call('ZRANGE', key, rank, rank, 'WITHSCORES')
    if not row[1] then break end
    if not add_named_row(letter, row[1], row[2]) then return rank, false end
  end
  return last + 1, true
end

local function build_reply(next_range, next_offset, is_too_large)
  return {next_range, next_offset, examined, examined_bytes, is_too_large or 0, rows}
end

if mode == 'rank' then
  local rank, ended = read_ranks(SETS[target], target, tonumber(offset), call('ZCARD', SETS[target]) - 1)
  return build_reply(ended and -1 or 0, tostring(rank))
end

if mode == 'near' then
  -- Range 0 looks up the tokens, and then reads all leases. The ranges from 1 on are the requests with one deadline
  -- in one set, which may be many.
  local tokens, count, seen, deadlines = load_active_tokens(target), 0, {}, {}
  for _ in pairs(tokens) do count = count + 1 end

  -- Return whether this page has a request for each token that is active under the id.
  local function all_tokens_found()
    for token in pairs(tokens) do
      local found = false
      for _, row in ipairs(rows) do found = found or string.find(row[4], token, 1, true) ~= nil end
      if not found then return false end
    end
    return count > 0
  end

  -- Compare bytes, because Redis sorts by bytes and `<` compares by the locale.
  local function starts_before(row, text)
    for at = 1, #text do
      local row_byte, text_byte = string.byte(row, at), string.byte(text, at)
      if row_byte ~= text_byte then return not row_byte or row_byte < text_byte end
    end
    return false
  end

  -- Add the request that begins with a text, if there is one. Requests with one score are sorted by their bytes, and
  -- a member begins with its token, in the form of our client (requests/request.py) or of the queue contract. So
  -- a binary search among a million requests takes some twenty reads.
  local function add_row_with_prefix(key, letter, score, text)
    local first = call('ZCOUNT', key, '-inf', '(' .. score)
    local low, high = first, first + call('ZCOUNT', key, score, score)
    local last = high
    while low < high do
      local middle = math.floor((low + high) / 2)
      if starts_before(call('ZRANGE', key, middle, middle)[1], text) then low = middle + 1 else high = middle end
    end
    local row = low < last and call('ZRANGE', key, low, low, 'WITHSCORES')
    if row and string.sub(row[1], 1, #text) == text then add_named_row(letter, row[1], row[2]) end
  end

  if range == 0 and offset == '0' and count <= MAX_TOKEN_LOOKUPS then
    for token, deadline in pairs(tokens) do
      for priority = 0, PRIORITIES - 1 do
        local score = string.format('%.0f', priority * PRIORITY_STEP + math.floor(deadline))
        for _, set in ipairs(token_sets) do
          for _, start in ipairs({'{"internal":{"retry_count":0,', '{"internal":{'}) do
            add_row_with_prefix(set[1], set[2], score, start .. '"request_token":"' .. token .. '"')
          end
        end
      end
    end
    if all_tokens_found() then return build_reply(-1, '0') end
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
    local next_rank, ended = read_ranks(LEASES, 'L', rank, call('ZCARD', LEASES) - 1)
    if not ended then return build_reply(0, tostring(next_rank)) end
    if all_tokens_found() then return build_reply(-1, '0') end
    range, rank = 1, 0
  end
  local last = #deadlines * PRIORITIES * #token_sets
  while range <= last do
    local key, letter = unpack(token_sets[(range - 1) % #token_sets + 1])
    local band = math.floor((range - 1) / #token_sets)
    local low = (band % PRIORITIES) * PRIORITY_STEP + deadlines[math.floor(band / PRIORITIES) + 1]
    local from, to = string.format('%.0f', low), '(' .. string.format('%.0f', low + 1)
    local count = call('ZCOUNT', key, from, to)
    if rank < count then
      local first = call('ZCOUNT', key, '-inf', '(' .. from)
      local next_rank, ended = read_ranks(key, letter, first + rank, first + count - 1)
      if not ended then return build_reply(range, tostring(next_rank - first)) end
    end
    range, rank = range + 1, 0
  end
  return build_reply(-1, '0')
end

-- A page of a cursor cannot be cut, because the cursor only points to its end. If a page has too many bytes, the
-- caller asks for fewer requests from the same cursor.
local page
if mode == 'pending' then page = call('ZSCAN', PENDING, offset, 'COUNT', max_count)
else page = call('HSCAN', ENTRIES, offset, 'COUNT', max_count) end
local items = page[2]
for number = 1, #items, 2 do
  local added
  if mode == 'pending' then added = add_named_row('P', items[number], items[number + 1])
  else added = add_entry_row(tonumber(items[number])) end
  if not added then
    if max_count > 1 then
      rows = {}
      return build_reply(0, offset, 1)
    end
    max_bytes = math.huge -- a page cannot be smaller than one bucket of the hash table, so take it whole
    if mode == 'pending' then add_named_row('P', items[number], items[number + 1])
    else add_entry_row(tonumber(items[number])) end
  end
end
return build_reply(page[1] == '0' and -1 or 0, page[1])
