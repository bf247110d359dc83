-- Take back the leases of owners that are gone and leases that ran out, and bring back what is due.
-- Of this line only: what else lies in LEASES is for the sweeps of its own line. Silence and gaps are the pool's.
-- A lease of another line that ran out lease_s ago is abandoned: nobody sweeps that line, or it would be gone. It counts
-- as lost and keeps its request, which that line's next sweep takes back, if there ever is one.
-- KEYS   own…
-- ARGV   owner, owner_timeout_s, lease_s, most of each kind, foreign (as in settle), queue.max_pending (0: none), then owners
--        that are proven gone…
-- Returns {now, reclaimed, due, when the next is due or false, 1 if there is more to do, units lost so far,
--         owners that hold leases, requests of sequences whose turn has come, cancelled ones that waited for their model}
-- Keeps: a lease is reclaimed when its owner is proven gone, has not shown itself for its own owner_timeout_s, or
-- has not renewed it. Who lives is given time to say so: after a gap between sweeps (the queue was away, all
-- owners were, or its clock jumped forward) longer than lease_s/3 no lease runs out for lease_s/3, and after one
-- longer than owner_timeout_s/2 or 2 s no silence counts for as long as any owner may be silent. When the clock
-- jumps back, every time kept here moves back with it, but for what `rewind` has of now.
local me, timeout_s, lease_s, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local now, shared = clock(), control()
all()
local any_awaited = call('TYPE', ABSENT).ok ~= 'none'
if any_awaited then models.checked() end
open()
rewind(shared, now)

local function shift(key, by, beyond)
  local found = call('ZRANGEBYSCORE', key, beyond, '+inf', 'WITHSCORES', 'LIMIT', 0, 9999)
  for at = 1, #found, 2 do call('ZADD', key, 'XX', text(tonumber(found[at + 1]) + by), found[at]) end
end
local function move(fields, by)
  for _, name in ipairs(fields) do
    if shared[name] then
      shared[name] = shared[name] + by
      call('HSET', CONTROL, name, text(shared[name]))
    end
  end
end
local function stay_quiet(field, quiet_s)
  shared[field] = math.max(now + quiet_s, shared[field] or 0)
  call('HSET', CONTROL, field, text(shared[field]))
end
if shared.tick and now < shared.tick - 1 then
  local by = now - shared.tick
  shift(LEASES, by, text(now + lease_s)) -- what is nearer may have been written since the jump
  move({'quiet_until'}, by)
elseif shared.tick and now - shared.tick > lease_s / 3 then
  stay_quiet('quiet_until', lease_s / 3)
end
-- Beats go by a tick of their own: owners of versions that know none move the other one.
local beats_tick = shared.beats_tick
if beats_tick and now < beats_tick - 1 then
  shift(BEATS, now - beats_tick, '-inf')
  move({'beats_quiet_until'}, now - beats_tick)
  stay_quiet('beats_quiet_until', timeout_s)
elseif shared.tick and now - (beats_tick or 0) > (timeout_s > 0 and math.min(timeout_s / 2, GAP_S) or GAP_S) then
  -- Others may be silent for longer than we: how long shows the furthest beat, if it is of before the gap. If it is
  -- of since, that is too much, but nobody's owner_timeout_s is above lease_s.
  local furthest = tonumber(call('ZRANGE', BEATS, -1, -1, 'WITHSCORES')[2] or 0)
  local longest_s = math.min(furthest - (beats_tick or now), lease_s)
  stay_quiet('beats_quiet_until', math.max(longest_s, timeout_s))
end
-- What is delayed goes by a tick of this line: another one's sweep may have been the first since the jump.
local line_tick = 'tick:' .. PENDING
local line_swept = tonumber(call('HGET', CONTROL, line_tick) or now)
if now < line_swept - 1 then
  shift(DELAYED, now - line_swept, '-inf')
  shift(LOOKS, now - line_swept, '-inf')
end
call('HSET', CONTROL, 'tick', text(now), 'beats_tick', text(now), line_tick, text(now))
local max_pending = 'max_pending:' .. PENDING
if ARGV[6] == '0' then call('HDEL', CONTROL, max_pending) else call('HSET', CONTROL, max_pending, ARGV[6]) end
beat(me, now, timeout_s)

-- The lease of that name as an item of `end_leases`; nil where its request is of another line.
local function ours(name)
  local id = tonumber(string.match(name, '^%d+'))
  local state = load(id)
  if state then return {id = id, state = state} end
end

local lost, stray = 0, 0 -- in units: so much less is free, for what they run may run on
local function reclaim(items)
  end_leases(items, shared.probe)
  for _, item in ipairs(items) do
    lost = lost + item.counted
    if item.stray then stray = stray + item.counted end
    item.state[DEATHS] = item.state[DEATHS] + 1
    give_back(item.id, item.state)
  end
end

-- Whether a lease of another line is one that nobody will take back: its own sweeps would have done so by now, were
-- there any, for they had as long since the last quiet time as since it ran out.
local function is_abandoned(name)
  return not string.find(name, '^%d+%*0:') and now >= (shared.quiet_until or 0) + lease_s
    and tonumber(call('ZSCORE', LEASES, name)) <= now - lease_s
end
local function abandon(name)
  local id, owner = string.match(name, '^%d+'), string.match(name, ':(.*)$')
  local units = tonumber(string.match(name, '^%d+%*(%d+):')) or 1
  call('ZADD', LEASES, call('ZSCORE', LEASES, name), abandoned_name(id, owner))
  call('ZREM', LEASES, name)
  hold(owner, -units, -units)
  if shared.probe == id then call('HDEL', CONTROL, 'probe', 'prober') end
  lost, stray = lost + units, stray + units
end

-- Who is gone: proven, or silent; of the silent, those without leases are forgotten.
local gone, silent, any = {}, {}, false
for number = 7, #ARGV do
  if ARGV[number] ~= me then gone[ARGV[number]], any = true, true end
end
if now >= (shared.beats_quiet_until or 0) then
  for _, owner in ipairs(call('ZRANGEBYSCORE', BEATS, '-inf', text(now), 'LIMIT', 0, most)) do
    if call('HEXISTS', OWNERS, owner) == 0 then
      call('ZREM', BEATS, owner)
    elseif not gone[owner] then
      silent[owner], any = true, true
    end
  end
end

local late, due = {}, 0
if any then
  local elsewhere = {}
  for _, name in ipairs(call('ZRANGE', LEASES, 0, -1)) do
    local owner = string.match(name, ':(.*)$')
    if gone[owner] or silent[owner] then
      if #late == most then break end
      local item = ours(name)
      if item then
        late[#late + 1] = item
        item.stray = silent[owner]
      else
        elsewhere[owner] = true
      end
    end
  end
  reclaim(late)
  if #late < most then
    for _, owners in ipairs({gone, silent}) do
      for owner in pairs(owners) do
        if not elsewhere[owner] then
          call('HDEL', OWNERS, owner)
          call('ZREM', BEATS, owner)
        end
      end
    end
  end
end
local reclaimed = #late
if now >= (shared.quiet_until or 0) and reclaimed < most then
  late = {}
  local abandoned, at, enough = {}, 0, most - reclaimed
  repeat
    local names = call('ZRANGEBYSCORE', LEASES, '-inf', text(now), 'LIMIT', at, most)
    for _, name in ipairs(names) do
      local item = #late < enough and ours(name)
      if item then
        item.stray = true
        late[#late + 1] = item
      elseif item == nil and is_abandoned(name) then
        abandoned[#abandoned + 1] = name
      end
    end
    at = at + most
  until #late == enough or #names < most
  reclaim(late)
  reclaimed = reclaimed + #late
  for _, name in ipairs(abandoned) do abandon(name) end
end
if lost > 0 then
  shared.lost = call('HINCRBY', CONTROL, 'lost', lost)
  if stray > 0 then call('HINCRBY', CONTROL, 'stray', stray) end
end

-- Look at one whose time has come.
local function look_at(one, now)
  one.look = false
  one.touched = math.min(one.touched, now)
  one.born, one.gap = one.born and math.min(one.born, now), one.gap and math.min(one.gap, now)
  if one.head then
    local state = load(one.head)
    if not state or state[WHERE] == 'X' then end_turn(one.head, {[TURN] = {0, one.id}}, nil, '', now) end
  elseif seats_of(one) == 0 and now >= one.touched + all().max_idle_s then
    if ENDED[one.status] then
      drop(one)
    else
      happened('idle')
      end_life(one, 'nothing of it ran or waited for max_idle_s', now)
    end
  else
    end_if_old(one, now)
  end
  advance(one, now)
  keep_one(one)
end

-- What is due by now, at most so many; how many that were. The oldest life first, and where time ends one, none begins
-- before all were looked at: what comes of it does not depend on which looks came too soon.
local function sweep_sequences(now, most)
  local ids, due = call('ZRANGEBYSCORE', LOOKS, '-inf', text(now), 'LIMIT', 0, most), {}
  for _, id in ipairs(ids) do
    local one = known(id)
    if one then due[#due + 1] = one else call('ZREM', LOOKS, id) end
  end
  table.sort(due, function(a, b) return a.lives[1][NUMBER] < b.lives[1][NUMBER] end)
  for _, one in ipairs(due) do
    -- A sequence that ended while an earlier one was looked at is no longer stored.
    if not one.gone then look_at(one, now) end
  end
  if call('ZCARD', PARKED) > 0 then
    for _ = 0, #due do unpark(now) end
  end
  keep_turns(now)
  return #ids
end

for _, name in ipairs(call('ZRANGEBYSCORE', DELAYED, '-inf', text(now), 'LIMIT', 0, most)) do
  local id = tonumber(name)
  local state = load(id)
  call('ZREM', DELAYED, name)
  call('ZREM', DELAYED_ORDER, name_in_order(id, state))
  give_back(id, state)
  due = due + 1
end
local next_due = call('ZRANGE', DELAYED, 0, 0, 'WITHSCORES')[2]
local looked = sweep_sequences(now, LOOKED_MOST)
local more = (reclaimed == most or due == most or looked == LOOKED_MOST) and 1 or 0
local revoked = any_awaited and models.call_back_cancelled(REVOKED_MOST, ARGV[5] == '1') or 0
return {text(now), reclaimed, due, next_due or false, more, shared.lost, call('HKEYS', OWNERS), moved, revoked}
