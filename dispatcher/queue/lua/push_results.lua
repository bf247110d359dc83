-- Push results from the outbox to a list in another slot.
-- Uses: require_commands, list_ttl
-- Keys: LIST, LAST_PUSHED
-- Arguments: ttl_s: number, last_pushed_ttl_s
-- List results: number, result
-- LAST_PUSHED has the newest pushed number of LIST, and is in the same slot. The numbers of the results rise.
-- Returns 1, or 0 if LIST is not a list or LAST_PUSHED not a number
-- Guarantees: each number is pushed at most once, however often it is delivered, because it is checked and set in
-- this step.
require_commands('TYPE', 'EXPIRE', 'GETRANGE', 'LPUSH', 'SET')
local kind = redis.call('TYPE', LIST).ok
if kind ~= 'none' and kind ~= 'list' then return 0 end
-- A producer that may name the list may also write a key with the name of LAST_PUSHED, of any type and size.
local NUMBER_BYTES = 32
local newest = redis.pcall('GETRANGE', LAST_PUSHED, 0, NUMBER_BYTES)
if newest == '' then newest = '0' end
if type(newest) == 'table' or #newest > NUMBER_BYTES or not tonumber(newest) then return 0 end
-- The first write cannot grow memory: after it, Redis takes all writes or none, even if its memory is full.
redis.call('EXPIRE', LAST_PUSHED, last_pushed_ttl_s)
for _, row in ipairs(results) do
  if tonumber(row.number) > tonumber(newest) then
    if type(redis.pcall('LPUSH', LIST, row.result)) == 'table' then return 0 end
    newest = row.number
  end
end
redis.call('SET', LAST_PUSHED, newest, 'EX', last_pushed_ttl_s)
set_list_ttl(LIST, kind == 'none', ttl_s)
return 1
