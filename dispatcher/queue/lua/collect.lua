-- Take results from the list of one client into its keep, which holds each under a number until that is given back.
-- KEYS   list, keep, owner
-- ARGV   me (empty: nobody shares the list), owner_s, the highest number seen (0: none), most, bytes, keep_s, numbers
--        to give back…
-- Returns {holder} where another client of that name takes them now; else {'', 1 if the keep is not the one that was
--         seen, last number, number, result…}: first those that were taken before and not seen
-- Keeps: a result lies in the list or in the keep until its number is given back; a repeated call gives the same again.
local list, keep, owner = KEYS[1], KEYS[2], KEYS[3]
local me, seen, most, bytes = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local call = redis.call
need('TYPE', 'GETRANGE', 'SET', 'HGET', 'HSET', 'HDEL', 'RPOP', 'TTL', 'EXPIRE')
for number, wanted in ipairs({'list', 'hash', 'string'}) do
  local found = call('TYPE', KEYS[number]).ok
  if found ~= 'none' and found ~= wanted then
    return redis.error_reply('WRONGKEY ' .. KEYS[number] .. ' holds a ' .. found .. ', not a ' .. wanted)
  end
end
if me ~= '' then
  local holder = call('GETRANGE', owner, 0, 1023)
  if holder ~= '' and holder ~= me then return {holder} end
end

-- The first write removes nothing from nowhere, so that what comes after is whole or not at all (common.lua).
call('HDEL', keep, '')
if me ~= '' then call('SET', owner, me, 'EX', ARGV[2]) end
for at = 7, #ARGV, 1000 do call('HDEL', keep, unpack(ARGV, at, math.min(at + 999, #ARGV))) end

local function text(number) return string.format('%.0f', number) end
local first, last = tonumber(call('HGET', keep, 'first') or 0), tonumber(call('HGET', keep, 'last') or 0)
if seen > 0 and (seen < first - 1 or seen > last) then return {'', 1, text(last)} end

-- Whoever comes next and has seen nothing looks from `first` on: it follows what is given back, some in each call.
local begin = first
local upto = ARGV[7] and math.min(seen + 1, first + 2 * #ARGV) or first
while first < upto and not call('HGET', keep, text(first)) do first = first + 1 end
if first > begin then call('HSET', keep, 'first', text(first)) end

local found, count, size = {}, 0, 0
local function tell(number, result)
  found[#found + 1], found[#found + 2] = text(number), result
  count, size = count + 1, size + #result
end
for number = math.max(seen + 1, first), last do
  if count >= most or size >= bytes then return {'', 0, text(number - 1), unpack(found)} end
  local result = call('HGET', keep, text(number))
  if result then tell(number, result) end
end
if count >= most or size >= bytes then return {'', 0, text(last), unpack(found)} end

local ttl_s = call('TTL', list)
local result = call('RPOP', list)
if not result then return {'', 0, text(last), unpack(found)} end
if first == 0 then
  -- Numbers of two keeps never meet.
  local time = call('TIME')
  first = tonumber(time[1]) * 1000000 + tonumber(time[2])
  last = first - 1
  call('HSET', keep, 'first', text(first))
end
while result do
  last = last + 1
  call('HSET', keep, text(last), result)
  tell(last, result)
  result = count < most and size < bytes and call('RPOP', list)
end
call('HSET', keep, 'last', text(last))
ttl_s = ttl_s > 0 and ttl_s or tonumber(ARGV[6])
if call('TTL', keep) < ttl_s then call('EXPIRE', keep, ttl_s) end
return {'', 0, text(last), unpack(found)}
