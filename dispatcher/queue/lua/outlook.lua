-- Tell how the line lies, closely where it decides who is late, and who works on its pool.
-- KEYS   own…
-- ARGV   owner_timeout_s, rate, service_s (rate 0: not known), most spans to split, bytes of a head, most owners
-- Returns {now, settled, leased, {low, high, count…}, {deadline or -1, head…}, owners, {owner, leases, silent_s or
--         false…}}; a span's low is -1 where its scores tell no deadline
-- Keeps: reads only, counts by rank and no member but the first of each priority: steps grow as log n.
need('ZCOUNT')
local timeout_s, rate, service = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local splits, bytes, most = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local now = clock()

local sets, total = {}, 0
for _, key in ipairs(WAITING) do
  local size = call('ZCARD', key)
  total = total + size
  if size > 0 then sets[#sets + 1] = key end
end

local function below(score)
  local count, bound = 0, '(' .. string.format('%.0f', score)
  for _, key in ipairs(sets) do count = count + call('ZCOUNT', key, '-inf', bound) end
  return count
end

-- The first of a range in each set. Bytes of a pending one are read whole, and so of ten at the most.
local heads, large = {}, 0
local function look_at(from, to, base)
  for _, key in ipairs(sets) do
    if key ~= PENDING or large < 10 then
      local found = call('ZRANGEBYSCORE', key, from, to, 'WITHSCORES', 'LIMIT', 0, 1)
      if found[1] then
        heads[#heads + 1] = base and string.format('%.3f', tonumber(found[2]) - base) or '-1'
        if key == PENDING then
          large = large + 1
          heads[#heads + 1] = string.sub(found[1], 1, bytes)
        else
          heads[#heads + 1] = string.sub(found[1], 1, -18)
        end
      end
    end
  end
end

-- Spans hold deadlines from low to before high. `seen`: how many scores are lower than the span's.
local spans = {}
local function add(seen, upto, low, high, base)
  if upto > seen then
    spans[#spans + 1] = {count = upto - seen, low = low, high = high, base = base, seen = seen, unsure = 0}
  end
end
local whole, seen = math.floor(now), total > 0 and below(0) or 0
add(0, seen, -1, -1)
if seen > 0 then look_at('-inf', '(0') end
for priority = 0, PRIORITIES - 1 do
  if seen == total then break end
  local base = priority * PRIORITY_STEP
  local upto = below(base + PRIORITY_STEP)
  if upto > seen then
    local told, last = below(base + TOLD_FROM), '(' .. string.format('%.0f', base + PRIORITY_STEP)
    add(seen, told, -1, -1)
    if upto > told then look_at(string.format('%.0f', base + TOLD_FROM), last, base)
    else look_at(string.format('%.0f', base), last) end
    local low = TOLD_FROM
    for _, ahead in ipairs({1, 60, 600, 3600, 21600, 86400, 604800}) do
      if told == upto then break end
      local high = whole + ahead
      local count = below(base + high)
      add(told, count, low, high, base)
      low, told = high, count
    end
    add(told, upto, low, PRIORITY_STEP, base)
    seen = upto
  end
end
add(seen, total, -1, -1)
if total > seen then look_at(string.format('%.0f', PRIORITIES * PRIORITY_STEP), '+inf') end

-- core/requests/forecast.py's at_risk, to see where it may come out otherwise: the most that one span leaves open, or 0
-- where all of them together leave open next to nothing.
local function unsure()
  local ahead, missed, sum, greatest = 0, 0, 0, 0
  for _, span in ipairs(spans) do
    span.unsure = 0
    if span.low >= 0 then
      local function in_time(deadline)
        return math.min(span.count, math.max(0, (deadline - now - service) * rate - ahead))
      end
      if span.high - span.low > 1 then
        span.unsure = in_time(span.high) - in_time(span.low)
        sum, greatest = sum + span.unsure, math.max(greatest, span.unsure)
      end
      missed = missed + span.count - in_time(span.high)
    end
    ahead = ahead + span.count
  end
  return sum > math.max(0.4, missed / 200) and greatest or 0
end

-- In the middle; of a span that reaches far, where a log scale has it.
local function middle(span)
  local near, far = math.max(1, span.low - whole), span.high - whole
  if far > 4 * near then return whole + math.floor(math.sqrt(near * far)) end
  return math.floor((span.low + span.high) / 2)
end

while rate > 0 and splits > 0 do
  local greatest = unsure()
  if greatest == 0 then break end
  local before = spans
  spans = {}
  for _, span in ipairs(before) do
    if span.unsure > 0 and span.unsure >= greatest / 4 and splits > 0 then
      splits = splits - 1
      local at = middle(span)
      local half = below(span.base + at)
      add(span.seen, half, span.low, at, span.base)
      add(half, span.seen + span.count, at, span.high, span.base)
    else
      spans[#spans + 1] = span
    end
  end
end
local rows = {}
for _, span in ipairs(spans) do
  rows[#rows + 1], rows[#rows + 2], rows[#rows + 3] = span.low, span.high, span.count
end

-- Owners that show that they live, then those that only hold leases.
local found, owners, told = {}, 0, {}
local function tell(owner, leases, silent)
  owners = owners + 1
  told[owner] = true
  if owners <= most then found[#found + 1], found[#found + 2], found[#found + 3] = owner, leases, silent end
end
local holders, leases = call('HKEYS', OWNERS), {}
if #holders > 0 then
  local counts = call('HMGET', OWNERS, unpack(holders, 1, math.min(#holders, 1000)))
  for at, count in ipairs(counts) do leases[holders[at]] = tonumber(count) end
end
local beats = call('ZRANGE', BEATS, -1000, -1, 'WITHSCORES')
for at = #beats - 1, 1, -2 do
  local owner, until_ = beats[at], tonumber(beats[at + 1])
  if now < until_ or leases[owner] then
    tell(owner, leases[owner] or 0, text(math.max(0, now - until_ + timeout_s)))
  end
end
for owner, count in pairs(leases) do
  if not told[owner] then tell(owner, count, false) end
end
return {text(now), tonumber(call('HGET', CONTROL, 'settled') or 0) or 0, call('ZCARD', LEASES), rows, heads, owners, found}
