-- Look at the front of the line.
-- KEYS   own…
-- ARGV   most, bytes
-- Returns score, member…
-- Keeps: reads only.
local found = {}
for _, one in ipairs((first(tonumber(ARGV[1]), tonumber(ARGV[2])))) do
  found[#found + 1] = one.score
  found[#found + 1] = one.id and call('HGET', MEMBERS, one.id) or one.name
end
return found
