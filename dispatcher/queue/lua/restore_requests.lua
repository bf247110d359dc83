-- Copy requests from another queue, each to the location that it had there.
-- Uses: require_commands, common, cancel_markers
-- Keys: queue, COPIED
-- Arguments: copied_ttl_s, channel
-- List requests: copy_id, location, score, member, deliveries: number, attempts: number, refusals: number,
--     deaths: number, units: number, time, reason, request_id, request_token, deadline: number
-- COPIED is the hash of the copied requests, by `copy_id`. `time` is when a request is due or died, and `reason` why it
-- is dead or the outcome of its last attempt. `request_id` is empty if it cannot be cancelled.
-- Returns the number of copied requests
-- Guarantees: each request is copied once, however often it is passed, even if it has ended here since.
require_commands('HSET', 'EXPIRE', 'ZADD', 'SET', 'GETRANGE', 'DEL')
local now, added_count, last_id = current_time(), 0, tonumber(call('HGET', CONTROL, 'next') or 0)
for _, request in ipairs(requests) do
  if call('HSET', COPIED, request.copy_id, '') == 1 then
    local location, score, member = request.location, request.score, request.member
    local time, reason = request.time, request.reason
    added_count = added_count + 1
    if location == 'P' then
      call('ZADD', PENDING, score, member)
    else
      last_id = last_id + 1
      local state = {location, score, request.deliveries, request.attempts, request.refusals, request.deaths, 1, '', '',
                     string.sub(member, 1, PREFIX_BYTES)}
      set_units(state, request.units)
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
    if request.request_id ~= '' then mark_active(request.request_id, request.request_token, request.deadline, now) end
  end
end
call('EXPIRE', COPIED, copied_ttl_s)
redis.pcall('PUBLISH', channel, 'work')
return added_count
