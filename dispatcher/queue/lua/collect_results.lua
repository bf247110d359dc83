-- Move results from the list of a client to its kept results, where each has a number until the client acknowledges
-- it.
-- KEYS   list, kept results, owner
-- ARGV   client id (empty: no other client shares the list), owner_s, the highest number that the client has seen (0:
--        none), max count, max bytes, lifetime of the kept results in seconds, acknowledged numbers…
-- Returns {the client that owns the list} if that is another one; otherwise {'', 1 if the kept results are not those
--         that the client has seen, last number, number, result…}. Results that were kept before and not seen come
--         first.
-- Guarantees: a result is in the list or among the kept results until its number is acknowledged. A repeated call
-- returns the same results again.
local list, kept, owner = KEYS[1], KEYS[2], KEYS[3]
local client_id, last_seen, max_count, max_bytes = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local call = redis.call
require_commands('TYPE', 'GETRANGE', 'SET', 'HGET', 'HSET', 'HDEL', 'RPOP', 'TTL', 'EXPIRE')
for number, expected in ipairs({'list', 'hash', 'string'}) do
  local kind = call('TYPE', KEYS[number]).ok
  if kind ~= 'none' and kind ~= expected then
    return redis.error_reply('WRONGKEY ' .. KEYS[number] .. ' holds a ' .. kind .. ', not a ' .. expected)
  end
end
if client_id ~= '' then
  local holder = call('GETRANGE', owner, 0, 1023)
  if holder ~= '' and holder ~= client_id then return {holder} end
end

-- The first write removes nothing: after it, Redis takes all writes or none (see `begin_writes` in common.lua).
call('HDEL', kept, '')
if client_id ~= '' then call('SET', owner, client_id, 'EX', ARGV[2]) end
for at = 7, #ARGV, 1000 do call('HDEL', kept, unpack(ARGV, at, math.min(at + 999, #ARGV))) end

local function format_integer(number) return string.format('%.0f', number) end
local first, last = tonumber(call('HGET', kept, 'first') or 0), tonumber(call('HGET', kept, 'last') or 0)
if last_seen > 0 and (last_seen < first - 1 or last_seen > last) then return {'', 1, format_integer(last)} end

-- A client that restarts has seen no number and reads from `first` on. So `first` follows the acknowledged numbers, a
-- few in each call.
local first_before = first
local skip_until = ARGV[7] and math.min(last_seen + 1, first + 2 * #ARGV) or first
while first < skip_until and not call('HGET', kept, format_integer(first)) do first = first + 1 end
if first > first_before then call('HSET', kept, 'first', format_integer(first)) end

local rows, count, size = {}, 0, 0
local function add_result(number, result)
  rows[#rows + 1], rows[#rows + 2] = format_integer(number), result
  count, size = count + 1, size + #result
end
for number = math.max(last_seen + 1, first), last do
  if count >= max_count or size >= max_bytes then return {'', 0, format_integer(number - 1), unpack(rows)} end
  local result = call('HGET', kept, format_integer(number))
  if result then add_result(number, result) end
end
if count >= max_count or size >= max_bytes then return {'', 0, format_integer(last), unpack(rows)} end

local ttl_s = call('TTL', list)
local result = call('RPOP', list)
if not result then return {'', 0, format_integer(last), unpack(rows)} end
if first == 0 then
  -- Numbers begin with the time in microseconds, so that the numbers of two generations of kept results never
  -- overlap.
  local time = call('TIME')
  first = tonumber(time[1]) * 1000000 + tonumber(time[2])
  last = first - 1
  call('HSET', kept, 'first', format_integer(first))
end
while result do
  last = last + 1
  call('HSET', kept, format_integer(last), result)
  add_result(last, result)
  result = count < max_count and size < max_bytes and call('RPOP', list)
end
call('HSET', kept, 'last', format_integer(last))
ttl_s = ttl_s > 0 and ttl_s or tonumber(ARGV[6])
if call('TTL', kept) < ttl_s then call('EXPIRE', kept, ttl_s) end
return {'', 0, format_integer(last), unpack(rows)}
