-- Return leased requests to the queue: to their place at once, or delayed, or to wait for their model.
-- KEYS   common keys…, reply record
-- ARGV   reply_s, then per request: id, token, delay_s, failed attempt, refusal, undelivered (0/1 each), outcome of
--        the attempt (empty: the outcome of an earlier one stays), the model to wait for (empty: none; otherwise the
--        delay is ignored), request id and token by which it can be cancelled there
-- Returns {now, status per request (0: done, 1: lost)…}
-- Guarantees: the request is in exactly one place, under its old score.
local REPLY = KEYS[KEY_COUNT + 1]
local recorded = call('GET', REPLY)
if recorded then return cmsgpack.unpack(recorded) end
local now, probe = current_time(), call('HGET', CONTROL, 'probe')
local statuses, ended, seen = {format_float(now)}, {}, {}
for at = 9, #ARGV, 10 do
  if ARGV[at] ~= '' then
    waiting_models.check_types()
    break
  end
end
begin_writes()
for at = 2, #ARGV, 10 do
  local item = {id = tonumber(ARGV[at]), at = at}
  item.state = not seen[item.id] and load_leased(item.id, ARGV[at + 1])
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
    waiting_models.add_entry(item.id, state, model, ARGV[item.at + 8], ARGV[item.at + 9])
  elseif delay_s > 0 then
    state[LOCATION], state[MOVES] = 'D', state[MOVES] + 1
    call('ZADD', DELAYED, format_float(now + delay_s), string.format('%016d', item.id))
    call('ZADD', DELAYED_ORDER, state[SCORE], ordered_name(item.id, state))
    save_entry(item.id, state)
  else
    return_to_queue(item.id, state)
  end
end
if #ended > 0 then call('SET', REPLY, cmsgpack.pack(statuses), 'EX', ARGV[1]) end
return statuses
