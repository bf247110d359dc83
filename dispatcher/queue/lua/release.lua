-- Return leased requests to the queue: to their place at once, or delayed, or to wait for their model.
-- Uses: owner_commands, common, waiting_for_model, claim_again
-- Keys: queue, REPLY
-- Arguments: reply_s, offer: packed
-- List releases: entry_id: number, token, delay_s: number, failed_attempts: number, refusals: number,
--     undelivered: number, last_attempt, missing_model, new_score, request_id, request_token, has_progress: flag,
--     progress, can_be_claimed_again: flag
-- `failed_attempts`, `refusals` and `undelivered` are 0 or 1. With an empty `last_attempt`, the outcome of an earlier
-- attempt stays. With an empty `new_score`, the score stays. A request that waits for its `missing_model` has no delay,
-- and can be cancelled there by `request_id` and `request_token`. With `has_progress`, `progress` replaces what is
-- stored. `offer` is one to claim requests again (claim_again.lua), or nil.
-- Returns {now, what was claimed: {owner reply, number of waiting requests, lease rows without members and progress}
--         (false: no offer, or no request that can be claimed again; in a repeated reply the number of leases, which a
--         claim by the same nonce returns),
--         status per request (0: done, 1: lost)…}
-- Guarantees: the request is in exactly one place, under the new score if there is one. Of the requests that can be
-- claimed again, those that the next claim would lease first are leased.
local recorded = call('GET', REPLY)
if recorded then return cmsgpack.unpack(recorded) end
local now, shared, probe = current_time(), offer and load_control(), call('HGET', CONTROL, 'probe')
local statuses, ended, seen, continued = {format_float(now), false}, {}, {}, {}
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
if offer then correct_future_times(shared, now) end
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
  elseif offer and item.can_be_claimed_again and is_started(state) then
    continued[#continued + 1] = item
  else
    return_to_queue(item.id, state)
  end
end

-- Select the continued requests that the next claim would lease first.
local function select_continued()
  local free, best, found = count_free_units(offer, shared, now), find_first_claimable(shared), {}
  for _, item in ipairs(continued) do
    item.tie_break = item.state[MEMBER_PREFIX]
    set_place(item, item.state[SCORE], LANES[choose_lane(item.state)])
  end
  table.sort(continued, is_before)
  for number, item in ipairs(continued) do
    free = free - get_units(item.state)
    if free < 0 or best and is_before(best, item) then break end
    found[number] = item
  end
  return found
end

local claimed = false
if #continued > 0 then
  local found, lease_rows = select_continued(), {}
  lease_items(found, offer, now)
  for number, item in ipairs(continued) do
    if number > #found then return_to_queue(item.id, item.state)
    else add_lease_row(lease_rows, item.id, item.state, '', '') end
  end
  statuses[2] = #found
  claimed = {
    build_owner_reply(shared, now, offer.owner, offer.lease_s),
    call('ZCARD', PENDING) + call('ZCARD', RETURNED) + call('ZCARD', STARTED), lease_rows,
  }
end
if #ended > 0 then call('SET', REPLY, cmsgpack.pack(statuses), 'EX', reply_s) end
statuses[2] = claimed
return statuses
