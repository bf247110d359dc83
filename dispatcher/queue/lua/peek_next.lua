-- Return the first requests of the queue.
-- Uses: require_commands, common, queue_order
-- Keys: queue
-- Arguments: max_count: number, max_bytes: number
-- Returns score, member…
-- Guarantees: only reads.
local found = {}
for _, candidate in ipairs((select_first(max_count, max_bytes))) do
  found[#found + 1] = candidate.score
  found[#found + 1] = candidate.id and call('HGET', MEMBERS, candidate.id) or candidate.name
end
return found
