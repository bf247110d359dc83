-- The time of Redis, and the form in which a time is written.
local call = redis.call

local function current_time()
  local time = call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1000000
end

local function format_float(number) return string.format('%.6f', number) end
