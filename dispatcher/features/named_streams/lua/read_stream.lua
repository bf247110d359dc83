-- Read the record of a named stream, a page at a time.
-- Uses: require_commands, common, cancel_markers, named_streams
-- Keys: queue, PENDING_IDS, CONSUMED_IDS, RESULT_LIST, KEPT
-- Arguments: kind, cursor, max_count
-- `kind` is pending or consumed. `cursor` is 0 at the beginning. The page has about `max_count` ids.
-- Returns {number of pending ids, number of consumed ids, number of results, next cursor (0: at the end), then of
--         each request: id, its record, 1 if it is in the queue or in flight}
-- Guarantees: only reads. An id that is there from the first page to the last is returned, perhaps twice.
check_type('hash', PENDING_IDS, CONSUMED_IDS, KEPT)
check_type('list', RESULT_LIST)
-- The hash of the kept results also has the first and the last number.
local kept_count = call('LLEN', RESULT_LIST) + math.max(0, call('HLEN', KEPT) - 2)
local hash = kind == 'consumed' and CONSUMED_IDS or PENDING_IDS
local page = call('HSCAN', hash, cursor, 'COUNT', max_count)
local found = {call('HLEN', PENDING_IDS), call('HLEN', CONSUMED_IDS), kept_count, page[1]}
for at = 1, #page[2], 2 do
  local id, record = page[2][at], page[2][at + 1]
  found[#found + 1], found[#found + 2] = id, record
  found[#found + 1] = hash == PENDING_IDS and load_active_tokens(id)[string.match(record, '^%S*')] and 1 or 0
end
return found
