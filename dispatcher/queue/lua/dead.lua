-- Show the dead, or take some away.
-- KEYS   own…
-- ARGV   "list", after, most, bytes; or "newest", 0, most, bytes: the newest first; or "purge", id…
-- Returns for a list: id, member, score, reason, died_at, deliveries, attempts, refusals, deaths…
--         for a purge: how many were there
-- Keeps: a dead request is forgotten whole or not at all.
if ARGV[1] ~= 'purge' then
  local found, size = {}, 0
  local ids
  if ARGV[1] == 'list' then
    ids = call('ZRANGEBYSCORE', DEAD, '(' .. ARGV[2], '+inf', 'LIMIT', 0, ARGV[3])
  else
    need('ZREVRANGE')
    ids = call('ZREVRANGE', DEAD, 0, ARGV[3] - 1)
  end
  for _, id in ipairs(ids) do
    size = size + call('HSTRLEN', MEMBERS, id)
    if #found > 0 and size > tonumber(ARGV[4]) then break end
    local state = load(id)
    for _, value in ipairs({tonumber(id), call('HGET', MEMBERS, id), state[SCORE], state[REASON], state[DIED],
                            state[DELIVERIES], state[ATTEMPTS], state[REFUSALS], state[DEATHS]}) do
      found[#found + 1] = value
    end
  end
  return found
end
local gone = 0
need('ZREM', 'HDEL')
for at = 2, #ARGV do
  local id = ARGV[at]
  if call('ZREM', DEAD, id) == 1 then
    call('ZREM', DEAD_AGE, string.format('%016d', id))
    forget({id})
    gone = gone + 1
  end
end
return gone
