-- Give leases back: to their place at once, or delayed.
-- KEYS   own…, reply record
-- ARGV   reply_s, then per request: id, token, delay_s, attempt, refusal, undelivered (0/1 each)
-- Returns {now, status per request (0 done, 1 lost)…}
-- Keeps: the request is in exactly one place, under its old score.
local REPLY = KEYS[OWN + 1]
local recorded = call('GET', REPLY)
if recorded then return cmsgpack.unpack(recorded) end
local now, probe = clock(), call('HGET', CONTROL, 'probe')
local statuses, any = {text(now)}, false
open()
for at = 2, #ARGV, 6 do
  local id, delay_s = tonumber(ARGV[at]), tonumber(ARGV[at + 2])
  local state = held(id, ARGV[at + 1])
  statuses[#statuses + 1] = state and 0 or 1
  if state then
    any = true
    end_lease(id, state, probe)
    state[ATTEMPTS] = state[ATTEMPTS] + tonumber(ARGV[at + 3])
    state[REFUSALS] = state[REFUSALS] + tonumber(ARGV[at + 4])
    state[DELIVERIES] = state[DELIVERIES] - tonumber(ARGV[at + 5])
    if delay_s > 0 then
      state[WHERE], state[MOVES] = 'D', state[MOVES] + 1
      call('ZADD', DELAYED, text(now + delay_s), string.format('%016d', id))
      call('ZADD', DELAYED_ORDER, state[SCORE], seat(id, state))
      save(id, state)
    else
      give_back(id, state)
    end
  end
end
if any then call('SET', REPLY, cmsgpack.pack(statuses), 'EX', ARGV[1]) end
return statuses
