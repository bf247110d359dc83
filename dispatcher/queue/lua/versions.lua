-- What is known in a pool of the versions of its models. These keys are not among those of other steps: nobody else looks
-- at them, and none of it costs a claim anything.
--
-- WARM, WARMING, USED   by the time until which it holds: '["version","endpoint"]', '["version","endpoint","owner"]' and
--                       '["owner","version"]'
-- LABELS, DRAINS        by when it was said: '["family","label","version","who"]' and '["version","who","why"]'
-- PINS, PINS_ASKED      by key '<until> <version>'; keys by when they were asked for last
--
-- JSON as Python writes it: who looks for what begins with some names finds no other, for each ends with its quote.

-- Whether the key of that number is ours. Another program's is left alone, and told of.
local problems = {}
local function ours(number)
  local found = call('TYPE', KEYS[number]).ok
  if found == 'none' or found == TYPES[number] then return true end
  problems[#problems + 1] = KEYS[number] .. ' holds a ' .. found .. ', not a ' .. TYPES[number]
  return false
end

local function begins(name, part) return string.sub(name, 1, #part) == part end

local function remove(set, names)
  for at = 1, #names, 1000 do call('ZREM', set, unpack(names, at, math.min(at + 999, #names))) end
end

-- What is of later than it may be is of the latest that may be, for the server's clock may have stepped back.
local function bring_back(set, now, for_s, ...)
  for _, name in ipairs(call('ZRANGEBYSCORE', set, '(' .. text(now + for_s + AHEAD_S), ...)) do
    call('ZADD', set, 'XX', text(now + for_s), name)
  end
end

-- What is over goes, and nothing holds for longer than from now on. The first write removes nothing from nowhere, so that
-- what comes after is whole or not at all (common.lua).
local function lapse(set, now, for_s)
  call('ZREM', set, '')
  remove(set, call('ZRANGEBYSCORE', set, '-inf', text(now)))
  bring_back(set, now, for_s, '+inf')
end

-- It holds from now on for so long, and the key with it: a pool that nobody serves leaves nothing.
local function hold_for(set, now, for_s, names, ...)
  for at = 1, #names, 1000 do
    local scored = {...}
    for number = at, math.min(at + 999, #names) do
      scored[#scored + 1] = text(now + for_s)
      scored[#scored + 1] = names[number]
    end
    call('ZADD', set, unpack(scored))
  end
  call('EXPIRE', set, for_s + 1)
end
