-- Return the version that each key keeps, or give it one.
-- KEYS   WARM_MARKERS…
-- ARGV   max number of pins, then for each: key, seconds to keep it, number of versions, and these: the proposed
--        version, then those that the key may keep
-- Returns for each the number of its version in that list (2 or more: one that it keeps); 1 if another program has
--         taken the key
-- Guarantees: a version stays given until its time after it was last asked for, unless it may not be kept any more.
-- If there are more pins than the maximum, those that were not asked for the longest are forgotten.
require_commands('TYPE', 'TIME', 'EXPIRE', 'HGET', 'HSET', 'HDEL', 'ZADD', 'ZREM', 'ZCARD', 'ZRANGE', 'ZRANGEBYSCORE')
local now, max_pins, at, chosen_numbers = current_time(), tonumber(ARGV[1]), 2, {}
local has_pins, has_pins_asked = is_own_key(6), is_own_key(7)
if has_pins and has_pins_asked then
  call('ZREM', PINS_LAST_USED, '') -- the first write removes nothing, as in `drop_expired`
  clamp_times(PINS_LAST_USED, now, -CLOCK_STEP_S, '+inf', 'LIMIT', 0, 1000)
end

local function read_pin(key)
  local value = call('HGET', PINS, key) or ''
  local until_at, version = string.match(value, '^(%d+%.%d+) (.*)$')
  return tonumber(until_at or 0), version
end

-- Both keys live as long as the pin that lasts longest.
local longest_until = has_pins and has_pins_asked and read_pin('') or 0
while ARGV[at] do
  local key, keep_s, count, chosen = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), 1
  local versions = at + 2
  at = versions + count + 1
  if has_pins and has_pins_asked then
    local until_at, version = read_pin(key)
    for number = 2, until_at > now and count or 1 do
      if ARGV[versions + number] == version then chosen = number end
    end
    call('HSET', PINS, key, format_float(now + keep_s) .. ' ' .. ARGV[versions + chosen])
    call('ZADD', PINS_LAST_USED, format_float(now), key)
    longest_until = math.max(longest_until, now + keep_s)
  end
  chosen_numbers[#chosen_numbers + 1] = chosen
end
if not (has_pins and has_pins_asked) or #chosen_numbers == 0 then return chosen_numbers end

-- Forget the pins that were not asked for the longest: all above the maximum, and of as many more as were asked for
-- now, those that have expired. So expired pins go at the rate at which new ones come.
local excess_count = math.max(0, call('ZCARD', PINS_LAST_USED) - max_pins)
local oldest = call('ZRANGE', PINS_LAST_USED, 0, excess_count + #chosen_numbers - 1)
local excess = call('ZCARD', PINS_LAST_USED) - max_pins
for number, key in ipairs(oldest) do
  if number > excess and read_pin(key) > now then break end
  call('ZREM', PINS_LAST_USED, key)
  call('HDEL', PINS, key)
end
longest_until = math.min(longest_until, now + MAX_PIN_S)
call('HSET', PINS, '', format_float(longest_until) .. ' ')
call('EXPIRE', PINS, math.ceil(longest_until - now) + 1)
call('EXPIRE', PINS_LAST_USED, math.ceil(longest_until - now) + 1)
return chosen_numbers
