-- Give leases back: to their place at once, or delayed.
-- KEYS   own…, reply record
-- ARGV   reply_s, then per request: id, token, delay_s, attempt, refusal, undelivered (0/1 each), what the try came to
--        (empty: what is known of an earlier one stays)
-- Returns {now, status per request (0 done, 1 lost)…}
-- Keeps: the request is in exactly one place, under its old score.
local REPLY = KEYS[OWN + 1]
local recorded = call('GET', REPLY)
if recorded then return cmsgpack.unpack(recorded) end
local now, probe = clock(), call('HGET', CONTROL, 'probe')
local statuses, ended, seen = {text(now)}, {}, {}
open()
for at = 2, #ARGV, 7 do
  local item = {id = tonumber(ARGV[at]), at = at}
  item.state = not seen[item.id] and held(item.id, ARGV[at + 1])
  statuses[#statuses + 1] = item.state and 0 or 1
  if item.state then
    seen[item.id] = true
    ended[#ended + 1] = item
  end
end
end_leases(ended, probe)
for _, item in ipairs(ended) do
  local state, delay_s = item.state, tonumber(ARGV[item.at + 2])
  state[ATTEMPTS] = state[ATTEMPTS] + tonumber(ARGV[item.at + 3])
  state[REFUSALS] = state[REFUSALS] + tonumber(ARGV[item.at + 4])
  state[DELIVERIES] = state[DELIVERIES] - tonumber(ARGV[item.at + 5])
  if ARGV[item.at + 6] ~= '' then state[REASON] = ARGV[item.at + 6] end
  if delay_s > 0 then
    state[WHERE], state[MOVES] = 'D', state[MOVES] + 1
    call('ZADD', DELAYED, text(now + delay_s), string.format('%016d', item.id))
    call('ZADD', DELAYED_ORDER, state[SCORE], name_in_order(item.id, state))
    save(item.id, state)
  else
    give_back(item.id, state)
  end
end
if #ended > 0 then call('SET', REPLY, cmsgpack.pack(statuses), 'EX', ARGV[1]) end
return statuses
