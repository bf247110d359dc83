-- List dead requests, or delete some.
-- KEYS   common keys…
-- ARGV   "list", the entry after which to begin, max count, max bytes
--        "newest", 0, max count, max bytes: the newest first
--        "purge", id…
-- Returns for a list: id, member, score, reason, died_at, deliveries, attempts, refusals, deaths… for a purge: the
--         number of deleted requests
-- Guarantees: a dead request is deleted as a whole or not at all.
if ARGV[1] ~= 'purge' then
  local found, size = {}, 0
  local ids
  if ARGV[1] == 'list' then
    ids = call('ZRANGEBYSCORE', DEAD, '(' .. ARGV[2], '+inf', 'LIMIT', 0, ARGV[3])
  else
    require_commands('ZREVRANGE')
    ids = call('ZREVRANGE', DEAD, 0, ARGV[3] - 1)
  end
  for _, id in ipairs(ids) do
    size = size + call('HSTRLEN', MEMBERS, id)
    if #found > 0 and size > tonumber(ARGV[4]) then break end
    local state = load_entry(id)
    for _, value in ipairs({tonumber(id), call('HGET', MEMBERS, id), state[SCORE], state[REASON], state[DIED_AT],
                            state[DELIVERIES], state[ATTEMPTS], state[REFUSALS], state[DEATHS]}) do
      found[#found + 1] = value
    end
  end
  return found
end
local purged_count = 0
require_commands('ZREM', 'HDEL')
for at = 2, #ARGV do
  local id = ARGV[at]
  if call('ZREM', DEAD, id) == 1 then
    call('ZREM', DEAD_AGE, string.format('%016d', id))
    delete_entries({id})
    purged_count = purged_count + 1
  end
end
return purged_count
