-- Copy requests from another queue, each to the location that it had there.
-- KEYS   common keys…, the hash of the copied requests
-- ARGV   lifetime of that hash in seconds, channel, then per request: its name there, name of its location, score,
--        member, deliveries, attempts, refusals, deaths, units, time when it is due or died, why it is dead or the
--        outcome of its last attempt, request id (empty: it cannot be cancelled), token, deadline
-- Returns the number of copied requests
-- Guarantees: each request is copied once, however often it is passed, even if it has ended here since.
local COPIED = KEYS[KEY_COUNT + 1]
require_commands('HSET', 'EXPIRE', 'ZADD', 'SET', 'GETRANGE', 'DEL')
local now, added_count, last_id = current_time(), 0, tonumber(call('HGET', CONTROL, 'next') or 0)
for at = 3, #ARGV, 14 do
  if call('HSET', COPIED, ARGV[at], '') == 1 then
    local location, score, member = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
    local time, reason = ARGV[at + 9], ARGV[at + 10]
    added_count = added_count + 1
    if location == 'P' then
      call('ZADD', PENDING, score, member)
    else
      last_id = last_id + 1
      local state = {location, score, tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6]),
                     tonumber(ARGV[at + 7]), 1, '', '', string.sub(member, 1, PREFIX_BYTES)}
      set_units(state, tonumber(ARGV[at + 8]))
      if reason ~= '' then state[REASON] = reason end
      call('HSET', MEMBERS, last_id, member)
      call('HSET', CONTROL, 'next', last_id)
      if location == 'D' then
        call('ZADD', DELAYED, time, string.format('%016d', last_id))
        call('ZADD', DELAYED_ORDER, score, ordered_name(last_id, state))
        save_entry(last_id, state)
      elseif location == 'X' then
        state[REASON], state[DIED_AT] = reason, time
        call('ZADD', DEAD, last_id, last_id)
        call('ZADD', DEAD_AGE, time, string.format('%016d', last_id))
        save_entry(last_id, state)
      else
        return_to_queue(last_id, state)
      end
    end
    if ARGV[at + 11] ~= '' then mark_active(ARGV[at + 11], ARGV[at + 12], tonumber(ARGV[at + 13]), now) end
  end
end
call('EXPIRE', COPIED, ARGV[1])
redis.pcall('PUBLISH', ARGV[2], 'work')
return added_count
