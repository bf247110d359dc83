-- Show what is noted of a named stream, a page at a time.
-- KEYS   own…, the stream's pending and consumed (streams.lua), its result list and the keep of that
-- ARGV   'pending' or 'consumed': of which ids; where to go on (0: at the beginning), how many ids a page aims at
-- Returns {ids that are pending, ids that are consumed, results that are kept, where to go on (0: nowhere), then of each
--         request: id, what is noted of it, 1 if it is in the queue or at work}
-- Keeps: it reads alone; what is there from its first page to its last is shown, some of it perhaps twice.
local NOTED, CONSUMED, results, keep = KEYS[OWN + 1], KEYS[OWN + 2], KEYS[OWN + 3], KEYS[OWN + 4]
check_kind('hash', NOTED, CONSUMED, keep)
check_kind('list', results)
-- Beside the results the keep has its first and its last number.
local kept = call('LLEN', results) + math.max(0, call('HLEN', keep) - 2)
local hash = ARGV[1] == 'consumed' and CONSUMED or NOTED
local page = call('HSCAN', hash, ARGV[2], 'COUNT', ARGV[3])
local found = {call('HLEN', NOTED), call('HLEN', CONSUMED), kept, page[1]}
for at = 1, #page[2], 2 do
  local id, noted = page[2][at], page[2][at + 1]
  found[#found + 1], found[#found + 2] = id, noted
  found[#found + 1] = hash == NOTED and active(id)[string.match(noted, '^%S*')] and 1 or 0
end
return found
