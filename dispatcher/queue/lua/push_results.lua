-- Push results from the outbox to a list in another slot.
-- KEYS   the list, its marker with the newest pushed number (in the same slot)
-- ARGV   ttl_s, lifetime of the marker in seconds, then number, result… in rising order
-- Returns 1, or 0 if the first key is not a list or the second not a marker
-- Guarantees: each number is pushed at most once, however often it is delivered, because it is checked and set in
-- this step.
require_commands('TYPE', 'EXPIRE', 'GETRANGE', 'LPUSH', 'SET')
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'none' and kind ~= 'list' then return 0 end
-- A producer that may name the list may also write a key with the name of the marker, of any type and size.
local NUMBER_BYTES = 32
local newest = redis.pcall('GETRANGE', KEYS[2], 0, NUMBER_BYTES)
if newest == '' then newest = '0' end
if type(newest) == 'table' or #newest > NUMBER_BYTES or not tonumber(newest) then return 0 end
-- The first write cannot grow memory: after it, Redis takes all writes or none, even if its memory is full.
redis.call('EXPIRE', KEYS[2], ARGV[2])
for at = 3, #ARGV, 2 do
  if tonumber(ARGV[at]) > tonumber(newest) then
    if type(redis.pcall('LPUSH', KEYS[1], ARGV[at + 1])) == 'table' then return 0 end
    newest = ARGV[at]
  end
end
redis.call('SET', KEYS[2], newest, 'EX', ARGV[2])
set_list_ttl(KEYS[1], kind == 'none', tonumber(ARGV[1]))
return 1
