-- Deliver results from the outbox into a list of another slot.
-- KEYS   the list, its sequence marker (same slot)
-- ARGV   ttl_s, marker_s, then number, result… in rising order
-- Returns 1, or 0 where the key is no list, or the marker none
-- Keeps: each number is pushed at most once, however often it is delivered, for it is checked and set here.
need('TYPE', 'EXPIRE', 'GETRANGE', 'LPUSH', 'SET')
local found = redis.call('TYPE', KEYS[1]).ok
if found ~= 'none' and found ~= 'list' then return 0 end
-- A producer that may name the list may also write a key with the marker's name, of any type and size.
local NUMBER_BYTES = 32
local newest = redis.pcall('GETRANGE', KEYS[2], 0, NUMBER_BYTES)
if newest == '' then newest = '0' end
if type(newest) == 'table' or #newest > NUMBER_BYTES or not tonumber(newest) then return 0 end
redis.call('EXPIRE', KEYS[2], ARGV[2]) -- cannot grow, so that a full node takes the rest whole, too
for at = 3, #ARGV, 2 do
  if tonumber(ARGV[at]) > tonumber(newest) then
    if type(redis.pcall('LPUSH', KEYS[1], ARGV[at + 1])) == 'table' then return 0 end
    newest = ARGV[at]
  end
end
redis.call('SET', KEYS[2], newest, 'EX', ARGV[2])
keep(KEYS[1], found == 'none', tonumber(ARGV[1]))
return 1
