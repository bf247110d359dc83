-- Say which version each of these keeps, or gets now.
-- KEYS   WARM…
-- ARGV   most, then for each: key, for_s, how many versions it may be given, and those: the one proposed, and those it keeps
-- Returns for each the number of its version among those (2…: one that it keeps); the first where another program's key
--         stands in the way
-- Keeps: what was given stays given until for_s after it was asked for last, unless it may not be kept. No more than `most`
--        are remembered: those that were asked for last.
need('TYPE', 'TIME', 'EXPIRE', 'HGET', 'HSET', 'HDEL', 'ZADD', 'ZREM', 'ZCARD', 'ZRANGE', 'ZRANGEBYSCORE')
local now, most, at, given = clock(), tonumber(ARGV[1]), 2, {}
local known, asked = ours(6), ours(7)
if known and asked then
  call('ZREM', PINS_ASKED, '') -- as in `lapse`
  bring_back(PINS_ASKED, now, -AHEAD_S, '+inf', 'LIMIT', 0, 1000)
end

local function pinned(key)
  local value = call('HGET', PINS, key) or ''
  local until_at, version = string.match(value, '^(%d+%.%d+) (.*)$')
  return tonumber(until_at or 0), version
end

-- Both keys last as long as what lasts longest of them.
local longest = known and asked and pinned('') or 0
while ARGV[at] do
  local key, for_s, count, chosen = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), 1
  local versions = at + 2
  at = versions + count + 1
  if known and asked then
    local until_at, version = pinned(key)
    for number = 2, until_at > now and count or 1 do
      if ARGV[versions + number] == version then chosen = number end
    end
    call('HSET', PINS, key, text(now + for_s) .. ' ' .. ARGV[versions + chosen])
    call('ZADD', PINS_ASKED, text(now), key)
    longest = math.max(longest, now + for_s)
  end
  given[#given + 1] = chosen
end
if not (known and asked) or #given == 0 then return given end

-- Those that were not asked for the longest: what is too many, and as many more as were asked for, where they are over.
local first = call('ZRANGE', PINS_ASKED, 0, math.max(0, call('ZCARD', PINS_ASKED) - most) + #given - 1)
local over = call('ZCARD', PINS_ASKED) - most
for number, key in ipairs(first) do
  if number > over and pinned(key) > now then break end
  call('ZREM', PINS_ASKED, key)
  call('HDEL', PINS, key)
end
longest = math.min(longest, now + PIN_MOST_S)
call('HSET', PINS, '', text(longest) .. ' ')
call('EXPIRE', PINS, math.ceil(longest - now) + 1)
call('EXPIRE', PINS_ASKED, math.ceil(longest - now) + 1)
return given
