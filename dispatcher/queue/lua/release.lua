-- Return leased requests to the queue: to their place at once, or delayed, or to where a feature lets them wait.
-- Uses: owner_commands, common
-- Keys: queue, REPLY
-- Arguments: reply_s, offer: packed
-- List releases: entry_id: number, token, delay_s: number, failed_attempts: number, refusals: number,
--     undelivered: number, last_attempt, new_score, request_id, request_token
-- `failed_attempts`, `refusals` and `undelivered` are 0 or 1. With an empty `last_attempt`, the outcome of an earlier
-- attempt stays. With an empty `new_score`, the score stays. `offer` is one to claim requests again
-- (claim_again.lua), or nil. A request that waits because of a feature can be cancelled by `request_id` and
-- `request_token`; both are empty for others.
-- Returns {now, what was claimed: {owner reply, number of waiting requests, lease rows without members and blobs}
--         (false: no offer, or no request that can be claimed again; in a repeated reply the number of leases, which a
--         claim by the same nonce returns),
--         status per request (0: done, 1: lost)…}
-- Guarantees: the request is in exactly one place, under the new score if there is one.
local recorded = call('GET', REPLY)
if recorded then return cmsgpack.unpack(recorded) end
local now, shared, probe = current_time(), offer and load_control(), call('HGET', CONTROL, 'probe')
local statuses, ended, seen = {format_float(now), false}, {}, {}
for _, item in ipairs(releases) do
  item.id = item.entry_id
  item.state = not seen[item.id] and load_leased(item.id, item.token)
  statuses[#statuses + 1] = item.state and 0 or 1
  if item.state then
    seen[item.id] = true
    ended[#ended + 1] = item
  end
end
features.call('before_writes', ended)
begin_writes()
if offer then correct_future_times(shared, now) end
end_leases(ended, probe)
for _, item in ipairs(ended) do
  local state = item.state
  features.call('released', item, state)
  state[ATTEMPTS] = state[ATTEMPTS] + item.failed_attempts
  state[REFUSALS] = state[REFUSALS] + item.refusals
  state[DELIVERIES] = state[DELIVERIES] - item.undelivered
  if item.last_attempt ~= '' then state[REASON] = item.last_attempt end
  if item.new_score ~= '' then state[SCORE] = item.new_score end
  if features.ask('take_place', item, state, offer) then
    -- A feature has put the entry into its place, or keeps it to be claimed again.
  elseif item.delay_s > 0 then
    state[LOCATION], state[MOVES] = 'D', state[MOVES] + 1
    call('ZADD', DELAYED, format_float(now + item.delay_s), string.format('%016d', item.id))
    call('ZADD', DELAYED_ORDER, state[SCORE], ordered_name(item.id, state))
    save_entry(item.id, state)
  else
    return_to_queue(item.id, state)
  end
end

local claimed = offer and features.ask('claim_more', offer, shared, now) or false
if claimed then statuses[2] = claimed.count end
if #ended > 0 then call('SET', REPLY, cmsgpack.pack(statuses), 'EX', reply_s) end
statuses[2] = claimed
return statuses
