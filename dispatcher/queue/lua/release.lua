-- Give leases back: to their place at once, or delayed; or to wait for their model.
-- KEYS   own…, reply record
-- ARGV   reply_s, then per request: id, token, delay_s, attempt, refusal, undelivered (0/1 each), what the try came to
--        (empty: what is known of an earlier one stays), the model that it is to wait for (empty: none; else no delay
--        counts), request id and token, by which it can be cancelled there
-- Returns {now, status per request (0 done, 1 lost)…}
-- Keeps: the request is in exactly one place, under its old score.
local REPLY = KEYS[OWN + 1]
local recorded = call('GET', REPLY)
if recorded then return cmsgpack.unpack(recorded) end
local now, probe = clock(), call('HGET', CONTROL, 'probe')
local statuses, ended, seen = {text(now)}, {}, {}
for at = 9, #ARGV, 10 do
  if ARGV[at] ~= '' then
    models.checked()
    break
  end
end
open()
for at = 2, #ARGV, 10 do
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
  local model = ARGV[item.at + 7]
  if model ~= '' then
    models.wait(item.id, state, model, ARGV[item.at + 8], ARGV[item.at + 9])
  elseif delay_s > 0 then
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
