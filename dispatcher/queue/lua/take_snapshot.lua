-- Take a snapshot of the queue: how many requests wait by deadline, and which owners work on the pool. The spans are
-- narrow where it decides which requests miss their deadlines.
-- Uses: require_commands, common
-- Keys: queue
-- Arguments: owner_timeout_s: number, rate: number, service_s: number, max_splits: number, head_bytes: number,
--     max_owners: number
-- A `rate` of 0 is not known. At most `max_splits` spans are split, and `head_bytes` is the largest first member.
-- Returns {now, settled leases, live leases, {low, high, count…}, {deadline or -1, first member…}, number of owners,
--         {owner, leases, seconds since its heartbeat or false…}}; the low of a span is -1 if its scores contain no
--         deadline
-- Guarantees: only reads. It counts by rank and reads no members but the first of each priority, so it takes time
-- proportional to log n.
require_commands('ZCOUNT')
local now = current_time()

local sets, total = {}, 0
for _, key in ipairs(WAITING_SETS) do
  local size = call('ZCARD', key)
  total = total + size
  if size > 0 then sets[#sets + 1] = key end
end

local function count_below(score)
  local count, bound = 0, '(' .. string.format('%.0f', score)
  for _, key in ipairs(sets) do count = count + call('ZCOUNT', key, '-inf', bound) end
  return count
end

-- Read the first member of a range from each set. Redis reads a pending member as a whole, so at most ten are read.
local heads, pending_reads = {}, 0
local function read_first_members(from, to, base)
  for _, key in ipairs(sets) do
    if key ~= PENDING or pending_reads < 10 then
      local row = call('ZRANGEBYSCORE', key, from, to, 'WITHSCORES', 'LIMIT', 0, 1)
      if row[1] then
        heads[#heads + 1] = base and string.format('%.3f', tonumber(row[2]) - base) or '-1'
        if key == PENDING then
          pending_reads = pending_reads + 1
          heads[#heads + 1] = string.sub(row[1], 1, head_bytes)
        else
          heads[#heads + 1] = string.sub(row[1], 1, -18)
        end
      end
    end
  end
end

-- A span has the deadlines from low up to but not including high. `lower_count` is the number of scores below the
-- span.
local spans = {}
local function add_span(lower_count, upper_count, low, high, base)
  if upper_count > lower_count then
    spans[#spans + 1] = {
      count = upper_count - lower_count, low = low, high = high, base = base, lower_count = lower_count, uncertain = 0,
    }
  end
end
local whole_now, lower_count = math.floor(now), total > 0 and count_below(0) or 0
add_span(0, lower_count, -1, -1)
if lower_count > 0 then read_first_members('-inf', '(0') end
for priority = 0, PRIORITIES - 1 do
  if lower_count == total then break end
  local base = priority * PRIORITY_STEP
  local upper_count = count_below(base + PRIORITY_STEP)
  if upper_count > lower_count then
    -- Scores below EARLIEST_DEADLINE contain no deadline.
    local counted, last = count_below(base + EARLIEST_DEADLINE), '(' .. string.format('%.0f', base + PRIORITY_STEP)
    add_span(lower_count, counted, -1, -1)
    if upper_count > counted then read_first_members(string.format('%.0f', base + EARLIEST_DEADLINE), last, base)
    else read_first_members(string.format('%.0f', base), last) end
    local low = EARLIEST_DEADLINE
    for _, ahead in ipairs({1, 60, 600, 3600, 21600, 86400, 604800}) do
      if counted == upper_count then break end
      local high = whole_now + ahead
      local count = count_below(base + high)
      add_span(counted, count, low, high, base)
      low, counted = high, count
    end
    add_span(counted, upper_count, low, PRIORITY_STEP, base)
    lower_count = upper_count
  end
end
add_span(lower_count, total, -1, -1)
if total > lower_count then read_first_members(string.format('%.0f', PRIORITIES * PRIORITY_STEP), '+inf') end

-- Return the largest number of requests of one span for which it is open whether they are at risk, or 0 if all spans
-- together leave next to nothing open. This repeats `count_at_risk` of requests/forecast.py.
local function max_uncertain()
  local ahead, missed, sum, greatest = 0, 0, 0, 0
  for _, span in ipairs(spans) do
    span.uncertain = 0
    if span.low >= 0 then
      local function in_time(deadline)
        return math.min(span.count, math.max(0, (deadline - now - service_s) * rate - ahead))
      end
      if span.high - span.low > 1 then
        span.uncertain = in_time(span.high) - in_time(span.low)
        sum, greatest = sum + span.uncertain, math.max(greatest, span.uncertain)
      end
      missed = missed + span.count - in_time(span.high)
    end
    ahead = ahead + span.count
  end
  return sum > math.max(0.4, missed / 200) and greatest or 0
end

-- Return where to split a span: in its middle, and on a log scale if it reaches far.
local function split_point(span)
  local near, far = math.max(1, span.low - whole_now), span.high - whole_now
  if far > 4 * near then return whole_now + math.floor(math.sqrt(near * far)) end
  return math.floor((span.low + span.high) / 2)
end

while rate > 0 and max_splits > 0 do
  local greatest = max_uncertain()
  if greatest == 0 then break end
  local before = spans
  spans = {}
  for _, span in ipairs(before) do
    if span.uncertain > 0 and span.uncertain >= greatest / 4 and max_splits > 0 then
      max_splits = max_splits - 1
      local at = split_point(span)
      local half = count_below(span.base + at)
      add_span(span.lower_count, half, span.low, at, span.base)
      add_span(half, span.lower_count + span.count, at, span.high, span.base)
    else
      spans[#spans + 1] = span
    end
  end
end
local rows = {}
for _, span in ipairs(spans) do
  rows[#rows + 1], rows[#rows + 2], rows[#rows + 3] = span.low, span.high, span.count
end

-- Owners with a heartbeat, and then those that only hold leases.
local owner_rows, owners, listed = {}, 0, {}
local function add_owner(owner, leases, silent_s)
  owners = owners + 1
  listed[owner] = true
  if owners <= max_owners then
    owner_rows[#owner_rows + 1], owner_rows[#owner_rows + 2], owner_rows[#owner_rows + 3] = owner, leases, silent_s
  end
end
local lease_owners, leases = call('HKEYS', OWNERS), {}
if #lease_owners > 0 then
  local counts = call('HMGET', OWNERS, unpack(lease_owners, 1, math.min(#lease_owners, 1000)))
  for at, count in ipairs(counts) do leases[lease_owners[at]] = tonumber(count) end
end
local heartbeats = call('ZRANGE', HEARTBEATS, -1000, -1, 'WITHSCORES')
for at = #heartbeats - 1, 1, -2 do
  local owner, until_ = heartbeats[at], tonumber(heartbeats[at + 1])
  if now < until_ or leases[owner] then
    add_owner(owner, leases[owner] or 0, format_float(math.max(0, now - until_ + owner_timeout_s)))
  end
end
for owner, count in pairs(leases) do
  if not listed[owner] then add_owner(owner, count, false) end
end
return {
  format_float(now), tonumber(call('HGET', CONTROL, 'settled') or 0) or 0, call('ZCARD', LEASES), rows, heads, owners,
  owner_rows,
}
