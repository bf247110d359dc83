-- Move results from the list of a client to its kept results, where each has a number until the client acknowledges
-- it.
-- Uses: require_commands
-- Keys: LIST, KEPT, OWNER
-- Arguments: client_id, owner_ttl_s, last_seen: number, max_count: number, max_bytes: number, kept_ttl_s: number
-- List acknowledged: text
-- `client_id` is empty if no other client shares the list. `last_seen` is the highest number that the client has seen,
-- or 0.
-- Returns {the client that owns the list} if that is another one; otherwise {'', 1 if the kept results are not those
--         that the client has seen, last number, number, result…}. Results that were kept before and not seen come
--         first.
-- Guarantees: a result is in the list or among the kept results until its number is acknowledged. A repeated call
-- returns the same results again.
local call = redis.call
require_commands('TYPE', 'GETRANGE', 'SET', 'HGET', 'HSET', 'HDEL', 'RPOP', 'TTL', 'EXPIRE')
for key, expected in pairs({[LIST] = 'list', [KEPT] = 'hash', [OWNER] = 'string'}) do
  local kind = call('TYPE', key).ok
  if kind ~= 'none' and kind ~= expected then
    return redis.error_reply('WRONGKEY ' .. key .. ' holds a ' .. kind .. ', not a ' .. expected)
  end
end
if client_id ~= '' then
  local holder = call('GETRANGE', OWNER, 0, 1023)
  if holder ~= '' and holder ~= client_id then return {holder} end
end

-- The first write removes nothing: after it, Redis takes all writes or none (see `begin_writes` in common.lua).
call('HDEL', KEPT, '')
if client_id ~= '' then call('SET', OWNER, client_id, 'EX', owner_ttl_s) end
for at = 1, #acknowledged, 1000 do
  call('HDEL', KEPT, unpack(acknowledged, at, math.min(at + 999, #acknowledged)))
end

local function format_integer(number) return string.format('%.0f', number) end
local first, last = tonumber(call('HGET', KEPT, 'first') or 0), tonumber(call('HGET', KEPT, 'last') or 0)
if last_seen > 0 and (last_seen < first - 1 or last_seen > last) then return {'', 1, format_integer(last)} end

-- A client that restarts has seen no number and reads from `first` on. So `first` follows the acknowledged numbers, a
-- few in each call.
local first_before = first
local skip_until = #acknowledged > 0 and math.min(last_seen + 1, first + 2 * #acknowledged + 12) or first
while first < skip_until and not call('HGET', KEPT, format_integer(first)) do first = first + 1 end
if first > first_before then call('HSET', KEPT, 'first', format_integer(first)) end

local rows, count, size = {}, 0, 0
local function add_result(number, result)
  rows[#rows + 1], rows[#rows + 2] = format_integer(number), result
  count, size = count + 1, size + #result
end
for number = math.max(last_seen + 1, first), last do
  if count >= max_count or size >= max_bytes then return {'', 0, format_integer(number - 1), unpack(rows)} end
  local result = call('HGET', KEPT, format_integer(number))
  if result then add_result(number, result) end
end
if count >= max_count or size >= max_bytes then return {'', 0, format_integer(last), unpack(rows)} end

local ttl_s = call('TTL', LIST)
local result = call('RPOP', LIST)
if not result then return {'', 0, format_integer(last), unpack(rows)} end
if first == 0 then
  -- Numbers begin with the time in microseconds, so that the numbers of two generations of kept results never
  -- overlap.
  local time = call('TIME')
  first = tonumber(time[1]) * 1000000 + tonumber(time[2])
  last = first - 1
  call('HSET', KEPT, 'first', format_integer(first))
end
while result do
  last = last + 1
  call('HSET', KEPT, format_integer(last), result)
  add_result(last, result)
  result = count < max_count and size < max_bytes and call('RPOP', LIST)
end
call('HSET', KEPT, 'last', format_integer(last))
ttl_s = ttl_s > 0 and ttl_s or kept_ttl_s
if call('TTL', KEPT) < ttl_s then call('EXPIRE', KEPT, ttl_s) end
return {'', 0, format_integer(last), unpack(rows)}
