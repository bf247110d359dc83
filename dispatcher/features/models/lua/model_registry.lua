-- The model registry of a pool: what its owners and operators say about versions of models. No other script reads
-- these keys, so they cost a claim nothing.
-- Uses: require_commands, time
--
-- WARM_MARKERS     '["version","endpoint"]' by the time until which it holds
-- WARM_UP_LOCKS    '["version","endpoint","owner"]' by the time until which it holds
-- MODELS_IN_USE    '["owner","version"]' by the time until which it holds
-- LABELS, DRAINS   '["family","label","version","who"]' and '["version","who","why"]', by the time when it was set
-- PINS             '<until> <version>' by key
-- PINS_LAST_USED   the same keys by the time when they were last asked for
--
-- The JSON has no spaces, as Python writes it. A search for entries that begin with some names finds no longer name,
-- because each name ends with its quote.

-- Return whether the key has the expected type. A key of another program is left alone and reported.
local problems = {}
local function is_own_key(key)
  local kind, expected = call('TYPE', key).ok, key == PINS and 'hash' or 'zset'
  if kind == 'none' or kind == expected then return true end
  problems[#problems + 1] = key .. ' holds a ' .. kind .. ', not a ' .. expected
  return false
end

local function starts_with(name, prefix) return string.sub(name, 1, #prefix) == prefix end

local function remove_members(set, names)
  for at = 1, #names, 1000 do call('ZREM', set, unpack(names, at, math.min(at + 999, #names))) end
end

-- Move times that are too far in the future to the latest possible one, because the clock of the server may have
-- stepped back.
local function clamp_times(set, now, duration_s, ...)
  for _, name in ipairs(call('ZRANGEBYSCORE', set, '(' .. format_float(now + duration_s + CLOCK_STEP_S), ...)) do
    call('ZADD', set, 'XX', format_float(now + duration_s), name)
  end
end

-- Remove expired members, and clamp the times of the others. The first write removes nothing: after it, Redis takes
-- all writes or none (see `begin_writes` in common.lua).
local function drop_expired(set, now, duration_s)
  call('ZREM', set, '')
  remove_members(set, call('ZRANGEBYSCORE', set, '-inf', format_float(now)))
  clamp_times(set, now, duration_s, '+inf')
end

-- Let members hold for `duration_s` from now on. The key expires with the last of them, so that a pool that is no
-- longer served leaves nothing behind.
local function set_until(set, now, duration_s, names, ...)
  for at = 1, #names, 1000 do
    local scored = {...}
    for number = at, math.min(at + 999, #names) do
      scored[#scored + 1] = format_float(now + duration_s)
      scored[#scored + 1] = names[number]
    end
    call('ZADD', set, unpack(scored))
  end
  call('EXPIRE', set, duration_s + 1)
end
