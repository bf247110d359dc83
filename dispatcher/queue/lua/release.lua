-- Return leased requests to the queue: to their place at once, or delayed, or to wait for their model.
-- Uses: owner_commands, common, waiting_for_model
-- Keys: queue, REPLY
-- Arguments: reply_s
-- List releases: entry_id: number, token, delay_s: number, failed_attempts: number, refusals: number,
--     undelivered: number, last_attempt, missing_model, new_score, request_id, request_token, has_progress: flag,
--     progress
-- `failed_attempts`, `refusals` and `undelivered` are 0 or 1. With an empty `last_attempt`, the outcome of an earlier
-- attempt stays. With an empty `new_score`, the score stays. A request that waits for its `missing_model` has no delay,
-- and can be cancelled there by `request_id` and `request_token`. With `has_progress`, `progress` replaces what is
-- stored.
-- Returns {now, status per request (0: done, 1: lost)…}
-- Guarantees: the request is in exactly one place, under the new score if there is one.
local recorded = call('GET', REPLY)
if recorded then return cmsgpack.unpack(recorded) end
local now, probe = current_time(), call('HGET', CONTROL, 'probe')
local statuses, ended, seen = {format_float(now)}, {}, {}
for _, item in ipairs(releases) do
  if item.missing_model ~= '' then
    waiting_models.check_types()
    break
  end
end
local has_started = false
for _, item in ipairs(releases) do
  item.id = item.entry_id
  item.state = not seen[item.id] and load_leased(item.id, item.token)
  statuses[#statuses + 1] = item.state and 0 or 1
  if item.state then
    seen[item.id] = true
    ended[#ended + 1] = item
    has_started = has_started or item.has_progress or item.state[PROGRESS_BYTES]
  end
end
if has_started then check_progress_types() end
begin_writes()
end_leases(ended, probe)
for _, item in ipairs(ended) do
  local state = item.state
  if item.has_progress and item.progress ~= '' then
    store_progress(item.id, state, item.progress)
    state[ATTEMPTS], state[REFUSALS] = 0, 0 -- they count for each slice
  elseif item.has_progress and state[PROGRESS_BYTES] then
    delete_progress({item.id})
    state[PROGRESS_BYTES] = nil
  end
  state[ATTEMPTS] = state[ATTEMPTS] + item.failed_attempts
  state[REFUSALS] = state[REFUSALS] + item.refusals
  state[DELIVERIES] = state[DELIVERIES] - item.undelivered
  if item.last_attempt ~= '' then state[REASON] = item.last_attempt end
  if item.new_score ~= '' then state[SCORE] = item.new_score end
  if item.missing_model ~= '' then
    waiting_models.add_entry(item.id, state, item.missing_model, item.request_id, item.request_token)
  elseif item.delay_s > 0 then
    state[LOCATION], state[MOVES] = 'D', state[MOVES] + 1
    call('ZADD', DELAYED, format_float(now + item.delay_s), string.format('%016d', item.id))
    call('ZADD', DELAYED_ORDER, state[SCORE], ordered_name(item.id, state))
    save_entry(item.id, state)
  else
    return_to_queue(item.id, state)
  end
end
if #ended > 0 then call('SET', REPLY, cmsgpack.pack(statuses), 'EX', reply_s) end
return statuses
