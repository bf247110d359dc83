-- List dead requests, or delete some.
-- Uses: require_commands, common
-- Keys: queue
-- Arguments: action, after, max_count, max_bytes: number
-- List purged: text
-- `action` is "list" for requests with an id above `after`, "newest" for those with the highest ids, or "purge" to
-- delete those with the ids of `purged`.
-- Returns for a list: id, member, score, reason, died_at, deliveries, attempts, refusals, deaths… for a purge: the
--         number of deleted requests
-- Guarantees: a dead request is deleted as a whole or not at all.
if action ~= 'purge' then
  local found, size = {}, 0
  local ids
  if action == 'list' then
    ids = call('ZRANGEBYSCORE', DEAD, '(' .. after, '+inf', 'LIMIT', 0, max_count)
  else
    require_commands('ZREVRANGE')
    ids = call('ZREVRANGE', DEAD, 0, max_count - 1)
  end
  for _, id in ipairs(ids) do
    size = size + call('HSTRLEN', MEMBERS, id)
    if #found > 0 and size > max_bytes then break end
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
for _, id in ipairs(purged) do
  if call('ZREM', DEAD, id) == 1 then
    call('ZREM', DEAD_AGE, string.format('%016d', id))
    delete_entries({{id = id}})
    purged_count = purged_count + 1
  end
end
return purged_count
