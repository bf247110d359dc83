-- Take over requests of another queue, each to the place where it lay, with what was counted of it.
-- KEYS   own…, the hash of what was taken over
-- ARGV   ttl_s of that hash, channel, then per request: its name there, name of its place, score, member, deliveries, attempts,
--        refusals, deaths, units, when it is due or died, why it is dead or what its last try came to, request id (empty: it cannot be cancelled),
--        token, deadline
-- Returns how many are new
-- Keeps: each is taken over once, however often it is handed in, also when it has ended here since.
local COPIED = KEYS[OWN + 1]
need('HSET', 'EXPIRE', 'ZADD', 'SET', 'GETRANGE', 'DEL')
local now, added, fresh = clock(), 0, tonumber(call('HGET', CONTROL, 'next') or 0)
for at = 3, #ARGV, 14 do
  if call('HSET', COPIED, ARGV[at], '') == 1 then
    local place, score, member = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
    local time, reason = ARGV[at + 9], ARGV[at + 10]
    added = added + 1
    if place == 'P' then
      call('ZADD', PENDING, score, member)
    else
      fresh = fresh + 1
      local state = {place, score, tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6]),
                     tonumber(ARGV[at + 7]), 1, '', '', string.sub(member, 1, PREFIX_BYTES)}
      weigh(state, tonumber(ARGV[at + 8]))
      if reason ~= '' then state[REASON] = reason end
      call('HSET', MEMBERS, fresh, member)
      call('HSET', CONTROL, 'next', fresh)
      if place == 'D' then
        call('ZADD', DELAYED, time, string.format('%016d', fresh))
        call('ZADD', DELAYED_ORDER, score, name_in_order(fresh, state))
        save(fresh, state)
      elseif place == 'X' then
        state[REASON], state[DIED] = reason, time
        call('ZADD', DEAD, fresh, fresh)
        call('ZADD', DEAD_AGE, time, string.format('%016d', fresh))
        save(fresh, state)
      else
        give_back(fresh, state)
      end
    end
    if ARGV[at + 11] ~= '' then mark(ARGV[at + 11], ARGV[at + 12], tonumber(ARGV[at + 13]), now) end
  end
end
call('EXPIRE', COPIED, ARGV[1])
redis.pcall('PUBLISH', ARGV[2], 'work')
return added
