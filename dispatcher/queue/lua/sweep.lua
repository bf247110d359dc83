-- Take back the leases of owners that have ended and leases that ran out, and return what is due to the queue. The
-- sweep is for this queue only: other leases in LEASES belong to the sweeps of their own queues. Silence and gaps are
-- states of the pool. A lease of another queue that ran out lease_s ago is abandoned, because a sweep of its queue
-- would have taken it back. It counts as lost and keeps its request, which the next sweep of its queue returns.
-- Uses: owner_commands, common, cancel_markers
-- Keys: queue
-- Arguments: owner, owner_timeout_s: number, lease_s: number, max_count: number, foreign: flag, max_pending
-- List ended_owners: text
-- `max_count` is the largest number of leases, and of due requests. `foreign` is as in settle.lua. `max_pending` is the
-- setting queue.max_pending, 0 for no limit. `ended_owners` are proven to have ended.
-- Returns {now, reclaimed leases, due requests, time of the next due request or false, 1 if there is more to do,
--         units lost so far, owners that hold leases, {name and result of each feature…}}
-- Guarantees: a lease is reclaimed only if its owner is proven to have ended, has sent no heartbeat for its own
-- owner_timeout_s, or has not renewed the lease. Living owners get time to speak first: after a gap between sweeps
-- (the queue was unreachable, all owners were, or the clock jumped forward) of more than lease_s/3, no lease runs out
-- for lease_s/3; after one of more than owner_timeout_s/2 or 2 s, no owner counts as silent for as long as any owner
-- may be silent. If the clock steps back, all times move back with it, except for those that `correct_future_times`
-- sets.
local now, shared = current_time(), load_control()
features.require_stored(shared)
local stored_names = {}
for _, feature in ipairs(features) do
  if feature.has_data then feature.is_used = feature.has_data() end
  if feature.is_used then
    features.check_types(feature)
    stored_names[#stored_names + 1] = feature.name
  end
end
begin_writes()
correct_future_times(shared, now)
for _, feature in ipairs(features) do
  if feature.field and shared[feature.field] and not feature.is_used then call('HDEL', CONTROL, feature.field) end
end

local function shift_scores(key, delta, range_start)
  local rows = call('ZRANGEBYSCORE', key, range_start, '+inf', 'WITHSCORES', 'LIMIT', 0, 9999)
  for at = 1, #rows, 2 do call('ZADD', key, 'XX', format_float(tonumber(rows[at + 1]) + delta), rows[at]) end
end
local function shift_fields(fields, delta)
  for _, name in ipairs(fields) do
    if shared[name] then
      shared[name] = shared[name] + delta
      call('HSET', CONTROL, name, format_float(shared[name]))
    end
  end
end
local function stay_quiet(field, quiet_s)
  shared[field] = math.max(now + quiet_s, shared[field] or 0)
  call('HSET', CONTROL, field, format_float(shared[field]))
end
local gap_s = shared.tick and now - shared.tick or 0
if gap_s < -1 then
  shift_scores(LEASES, gap_s, format_float(now + lease_s)) -- earlier scores may have been written since the step
  shift_scores(HEARTBEATS, gap_s, '-inf')
  shift_fields({'quiet_until', 'heartbeats_quiet_until'}, gap_s)
  stay_quiet('heartbeats_quiet_until', owner_timeout_s)
end
if gap_s > lease_s / 3 then stay_quiet('quiet_until', lease_s / 3) end
if gap_s > (owner_timeout_s > 0 and math.min(owner_timeout_s / 2, SWEEP_GAP_S) or SWEEP_GAP_S) then
  -- Other owners may be silent for longer than this one. The latest heartbeat tells how long, if it is from before
  -- the gap. If it is from after the gap, the result is too large; no owner_timeout_s is above lease_s, which bounds
  -- it.
  local furthest = tonumber(call('ZRANGE', HEARTBEATS, -1, -1, 'WITHSCORES')[2] or 0)
  stay_quiet('heartbeats_quiet_until', math.max(math.min(furthest - shared.tick, lease_s), owner_timeout_s))
end
-- Delayed requests have a tick of this queue, because the sweep of another queue may have been the first after a step
-- of the clock.
local tick_field = 'tick:' .. PENDING
local last_swept_at = tonumber(call('HGET', CONTROL, tick_field) or now)
if now < last_swept_at - 1 then
  shift_scores(DELAYED, now - last_swept_at, '-inf')
  for _, feature in ipairs(features) do
    if feature.timed_key then shift_scores(feature.timed_key, now - last_swept_at, '-inf') end
  end
end
call('HSET', CONTROL, 'tick', format_float(now), tick_field, format_float(now))
local stored = table.concat(stored_names, ' ')
if stored ~= (shared[features.stored_field] or '') then
  if stored == '' then call('HDEL', CONTROL, features.stored_field)
  else call('HSET', CONTROL, features.stored_field, stored) end
end
local max_pending_field = 'max_pending:' .. PENDING
if max_pending == '0' then call('HDEL', CONTROL, max_pending_field)
else call('HSET', CONTROL, max_pending_field, max_pending) end
record_heartbeat(owner, now, owner_timeout_s)

-- Return the lease of that name as an item of `end_leases`, or nil if its request belongs to another queue.
local function find_own_lease(name)
  local id = tonumber(string.match(name, '^%d+'))
  local state = load_entry(id)
  if state then return {id = id, state = state} end
end

-- In units. Lost units lower the limit, because the requests of these leases may still run.
local lost, orphaned = 0, 0
local function reclaim(items)
  end_leases(items, shared.probe)
  for _, item in ipairs(items) do
    lost = lost + item.counted
    if item.is_orphaned then orphaned = orphaned + item.counted end
    item.state[DEATHS] = item.state[DEATHS] + 1
    return_to_queue(item.id, item.state)
  end
end

-- Return whether no sweep will take back this lease of another queue. Its own sweeps would have done so by now: they
-- had lease_s since it ran out, and since the last time in which no lease ran out.
local function is_abandoned(name)
  return not string.find(name, '^%d+%*0:') and now >= (shared.quiet_until or 0) + lease_s
    and tonumber(call('ZSCORE', LEASES, name)) <= now - lease_s
end
local function abandon(name)
  local id, owner = string.match(name, '^%d+'), string.match(name, ':(.*)$')
  local units = tonumber(string.match(name, '^%d+%*(%d+):')) or 1
  call('ZADD', LEASES, call('ZSCORE', LEASES, name), abandoned_lease_name(id, owner))
  call('ZREM', LEASES, name)
  add_owner_units(owner, -units, -units)
  if shared.probe == id then call('HDEL', CONTROL, 'probe', 'prober') end
  lost, orphaned = lost + units, orphaned + units
end

-- Find owners that have ended: those that are proven to, and silent ones. Silent owners without leases are forgotten.
local gone, silent, any_owner_gone = {}, {}, false
for _, ended_owner in ipairs(ended_owners) do
  if ended_owner ~= owner then gone[ended_owner], any_owner_gone = true, true end
end
if now >= (shared.heartbeats_quiet_until or 0) then
  for _, owner in ipairs(call('ZRANGEBYSCORE', HEARTBEATS, '-inf', format_float(now), 'LIMIT', 0, max_count)) do
    if call('HEXISTS', OWNERS, owner) == 0 then
      call('ZREM', HEARTBEATS, owner)
    elseif not gone[owner] then
      silent[owner], any_owner_gone = true, true
    end
  end
end

local reclaimable, due_count = {}, 0
if any_owner_gone then
  local elsewhere = {}
  for _, name in ipairs(call('ZRANGE', LEASES, 0, -1)) do
    local owner = string.match(name, ':(.*)$')
    if gone[owner] or silent[owner] then
      if #reclaimable == max_count then break end
      local item = find_own_lease(name)
      if item then
        reclaimable[#reclaimable + 1] = item
        item.is_orphaned = silent[owner]
      else
        elsewhere[owner] = true
      end
    end
  end
  reclaim(reclaimable)
  if #reclaimable < max_count then
    for _, owners in ipairs({gone, silent}) do
      for owner in pairs(owners) do
        if not elsewhere[owner] then
          call('HDEL', OWNERS, owner)
          call('ZREM', HEARTBEATS, owner)
        end
      end
    end
  end
end
local reclaimed = #reclaimable
if now >= (shared.quiet_until or 0) and reclaimed < max_count then
  reclaimable = {}
  local abandoned, at, enough = {}, 0, max_count - reclaimed
  repeat
    local names = call('ZRANGEBYSCORE', LEASES, '-inf', format_float(now), 'LIMIT', at, max_count)
    for _, name in ipairs(names) do
      local item = #reclaimable < enough and find_own_lease(name)
      if item then
        item.is_orphaned = true
        reclaimable[#reclaimable + 1] = item
      elseif item == nil and is_abandoned(name) then
        abandoned[#abandoned + 1] = name
      end
    end
    at = at + max_count
  until #reclaimable == enough or #names < max_count
  reclaim(reclaimable)
  reclaimed = reclaimed + #reclaimable
  for _, name in ipairs(abandoned) do abandon(name) end
end
if lost > 0 then
  shared.lost = call('HINCRBY', CONTROL, 'lost', lost)
  if orphaned > 0 then call('HINCRBY', CONTROL, 'orphaned', orphaned) end
end

for _, name in ipairs(call('ZRANGEBYSCORE', DELAYED, '-inf', format_float(now), 'LIMIT', 0, max_count)) do
  local id = tonumber(name)
  local state = load_entry(id)
  call('ZREM', DELAYED, name)
  call('ZREM', DELAYED_ORDER, ordered_name(id, state))
  return_to_queue(id, state)
  due_count = due_count + 1
end
local next_due = call('ZRANGE', DELAYED, 0, 0, 'WITHSCORES')[2]
local has_more, results = reclaimed == max_count or due_count == max_count, {}
for _, feature in ipairs(features) do
  if feature.swept then
    local count, is_cut = feature.swept(now, foreign)
    results[#results + 1], results[#results + 2], has_more = feature.name, count, has_more or is_cut
  end
end
return {
  format_float(now), reclaimed, due_count, next_due or false, has_more and 1 or 0, shared.lost, call('HKEYS', OWNERS),
  results,
}
