-- Write results and end their leases, or move the requests to the dead-letter set.
-- Uses: owner_commands, common, queue_order, cancel_markers, write_results
-- Keys: queue, REPLY, DEFAULT_LIST
-- Arguments: reply_s, ttl_s: number, foreign: flag, dead_max: number, offer: packed
-- List items: delivery: number, list, result, request_id, request_token, name, token, is_dead: number,
--     is_failed_attempt: number, reason
-- `foreign` is true if the markers of llm-d's producers can be reached from here. `offer` is one to claim requests that
-- may run because of this step (claim_again.lua), or nil. Of an item, `name` is the id of the entry as text, `delivery`
-- is 0 for no result, 1 for a push and 2 for the outbox, `request_id` is empty if the markers stay, and `is_dead` and
-- `is_failed_attempt` are 0 or 1.
-- Returns {now, dead requests dropped for dead_max, what was claimed (false: no offer; in a repeated reply the number
--         of leases, which a claim by the same nonce returns), status per request…}
-- Guarantees: a result is written exactly when its lease ends, in this one step, and only by the holder of its token.
local recorded = call('GET', REPLY)
if recorded then return cmsgpack.unpack(recorded) end
local now, shared = current_time(), offer and load_control()
local probe = features.load_used('probe')
local live, seen, ids = {}, {}, {}
for number, item in ipairs(items) do
  item.id, item.status = tonumber(item.name), LOST
  ids[number] = item.name
end
for number, packed in ipairs(#ids > 0 and call('HMGET', ENTRIES, unpack(ids)) or {}) do
  local item, state = items[number], packed and cmsgpack.unpack(packed)
  if state and not seen[item.id] and state[LOCATION] == 'L' and state[TOKEN] == item.token then
    seen[item.id], item.state = true, state
    live[#live + 1] = item
  end
end
features.call('before_writes', live)

local dropped, statuses, claimed = 0, {format_float(now), 0, false}, false
if #live > 0 then
  begin_writes()
  if offer then correct_future_times(shared, now) end
  write_results(live, ttl_s, now)
  local ended, finished = {}, {}
  for _, item in ipairs(live) do
    if item.status == DONE then ended[#ended + 1] = item end
  end
  end_leases(ended, probe)
  if #ended > 0 then call('HINCRBY', CONTROL, 'settled', #ended) end
  for _, item in ipairs(ended) do
    features.call('ended', item, now)
    if item.is_dead == 1 then
      local state = item.state
      state[LOCATION], state[MOVES], state[REASON], state[DIED_AT] =
        'X', state[MOVES] + 1, item.reason, format_float(now)
      if item.is_failed_attempt == 1 then state[ATTEMPTS] = state[ATTEMPTS] + 1 end
      save_entry(item.id, state)
      call('ZADD', DEAD, item.id, item.id)
      call('ZADD', DEAD_AGE, format_float(now), string.format('%016d', item.id))
    else
      finished[#finished + 1] = item
    end
    delete_markers(item, foreign, now)
  end
  delete_entries(finished)
  claimed = offer and features.ask('claim_more', offer, shared, now) or false
  features.call('flush', now)
  while call('ZCARD', DEAD) > dead_max do
    local id = tonumber(call('ZPOPMIN', DEAD_AGE)[1])
    call('ZREM', DEAD, id)
    delete_entries({{id = id}})
    dropped = dropped + 1
  end
end
statuses[2] = dropped
for _, item in ipairs(items) do statuses[#statuses + 1] = item.status end
if #live > 0 then
  -- A repetition of this call gets the number of claimed leases only. A claim by the nonce returns the leases.
  statuses[3] = claimed and claimed.count or 0
  call('SET', REPLY, cmsgpack.pack(statuses), 'EX', reply_s)
end
statuses[3] = claimed
return statuses
