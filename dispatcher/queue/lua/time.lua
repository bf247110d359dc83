-- Redis TIME, and how a time is written.
local call = redis.call

local function clock()
  local time = call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1000000
end

local function text(number) return string.format('%.6f', number) end
