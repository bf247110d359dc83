-- Read the record of a named stream, a page at a time.
-- KEYS   common keys…, the stream's pending and consumed hashes (named_streams.lua), its result list and the kept results of
--        that
-- ARGV   'pending' or 'consumed': which ids; cursor (0: at the beginning), number of ids to aim at
-- Returns {number of pending ids, number of consumed ids, number of results, next cursor (0: at the end), then of
--         each request: id, its record, 1 if it is in the queue or in flight}
-- Guarantees: only reads. An id that is there from the first page to the last is returned, perhaps twice.
local PENDING_IDS, CONSUMED_IDS = KEYS[KEY_COUNT + 1], KEYS[KEY_COUNT + 2]
local results, kept = KEYS[KEY_COUNT + 3], KEYS[KEY_COUNT + 4]
check_type('hash', PENDING_IDS, CONSUMED_IDS, kept)
check_type('list', results)
-- The hash of the kept results also has the first and the last number.
local kept_count = call('LLEN', results) + math.max(0, call('HLEN', kept) - 2)
local hash = ARGV[1] == 'consumed' and CONSUMED_IDS or PENDING_IDS
local page = call('HSCAN', hash, ARGV[2], 'COUNT', ARGV[3])
local found = {call('HLEN', PENDING_IDS), call('HLEN', CONSUMED_IDS), kept_count, page[1]}
for at = 1, #page[2], 2 do
  local id, record = page[2][at], page[2][at + 1]
  found[#found + 1], found[#found + 2] = id, record
  found[#found + 1] = hash == PENDING_IDS and load_active_tokens(id)[string.match(record, '^%S*')] and 1 or 0
end
return found
