-- Return the first requests of the queue.
-- KEYS   common keys…
-- ARGV   max count, max bytes
-- Returns score, member…
-- Guarantees: only reads.
local found = {}
for _, candidate in ipairs((select_first(tonumber(ARGV[1]), tonumber(ARGV[2])))) do
  found[#found + 1] = candidate.score
  found[#found + 1] = candidate.id and call('HGET', MEMBERS, candidate.id) or candidate.name
end
return found
