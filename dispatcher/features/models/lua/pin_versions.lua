-- Return the version that each key keeps, or give it one.
-- Uses: require_commands, time, model_registry
-- Keys: models
-- Arguments: max_pins: number
-- List pins: key, keep_s: number, version_count: number
-- List versions: text
-- `versions` has for each pin the proposed version, and then those that the key may keep.
-- Returns for each the number of its version in that list (2 or more: one that it keeps); 1 if another program has
--         taken the key
-- Guarantees: a version stays given until its time after it was last asked for, unless it may not be kept any more.
-- If there are more pins than the maximum, those that were not asked for the longest are forgotten.
require_commands('TYPE', 'TIME', 'EXPIRE', 'HGET', 'HSET', 'HDEL', 'ZADD', 'ZREM', 'ZCARD', 'ZRANGE', 'ZRANGEBYSCORE')
local now, first_version, chosen_numbers = current_time(), 1, {}
local has_pins, has_last_used = is_own_key(PINS), is_own_key(PINS_LAST_USED)
local is_usable = has_pins and has_last_used
if is_usable then
  call('ZREM', PINS_LAST_USED, '') -- the first write removes nothing, as in `drop_expired`
  clamp_times(PINS_LAST_USED, now, -CLOCK_STEP_S, '+inf', 'LIMIT', 0, 1000)
end

local function read_pin(key)
  local value = call('HGET', PINS, key) or ''
  local until_at, version = string.match(value, '^(%d+%.%d+) (.*)$')
  return tonumber(until_at or 0), version
end

-- Both keys live as long as the pin that lasts longest.
local longest_until = is_usable and read_pin('') or 0
for number, pin in ipairs(pins) do
  local chosen = 1
  if is_usable then
    local until_at, kept_version = read_pin(pin.key)
    for candidate = 2, until_at > now and pin.version_count or 1 do
      if versions[first_version + candidate - 1] == kept_version then chosen = candidate end
    end
    call('HSET', PINS, pin.key, format_float(now + pin.keep_s) .. ' ' .. versions[first_version + chosen - 1])
    call('ZADD', PINS_LAST_USED, format_float(now), pin.key)
    longest_until = math.max(longest_until, now + pin.keep_s)
  end
  chosen_numbers[number], first_version = chosen, first_version + pin.version_count
end
if not is_usable or #chosen_numbers == 0 then return chosen_numbers end

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
