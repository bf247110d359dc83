-- Take back the leases of owners that are gone and leases that ran out, and bring back what is due.
-- KEYS   own…
-- ARGV   owner, owner_timeout_s, lease_s, most of each kind, then owners that are proven gone…
-- Returns {now, reclaimed, due, when the next is due or false, 1 if there is more to do, lost so far,
--         owners that hold leases}
-- Keeps: a lease is reclaimed when its owner is proven gone, has not shown itself for its own owner_timeout_s, or
-- has not renewed it. Who lives is given time to say so: after a gap between sweeps (the queue was away, all
-- owners were, or its clock jumped forward) longer than lease_s/3 no lease runs out for lease_s/3, and after one
-- longer than owner_timeout_s/2 no silence counts for owner_timeout_s. When the clock jumps back, every time kept
-- here moves back with it.
local me, timeout_s, lease_s, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local now, shared = clock(), control()
open()

local function shift(key, by, beyond)
  local found = call('ZRANGEBYSCORE', key, beyond, '+inf', 'WITHSCORES', 'LIMIT', 0, 9999)
  for at = 1, #found, 2 do call('ZADD', key, 'XX', text(tonumber(found[at + 1]) + by), found[at]) end
end
local function stay_quiet(field, calm_s)
  shared[field] = now + calm_s
  call('HSET', CONTROL, field, text(shared[field]))
end
if shared.tick and now < shared.tick - 1 then
  local by = now - shared.tick
  shift(LEASES, by, text(now + lease_s)) -- what is nearer may have been written since the jump
  shift(BEATS, by, '-inf')
  shift(DELAYED, by, '-inf')
  for _, name in ipairs({'read_at', 'overload_at', 'overload_until', 'quiet_until', 'beats_quiet_until'}) do
    if shared[name] then
      shared[name] = shared[name] + by
      call('HSET', CONTROL, name, text(shared[name]))
    end
  end
  stay_quiet('beats_quiet_until', timeout_s)
elseif shared.tick then
  if now - shared.tick > lease_s / 3 then stay_quiet('quiet_until', lease_s / 3) end
  if now - shared.tick > timeout_s / 2 then stay_quiet('beats_quiet_until', timeout_s) end
end
call('HSET', CONTROL, 'tick', text(now))
beat(me, now, timeout_s)

local function reclaim(names)
  local items = {}
  for number, name in ipairs(names) do
    local id = tonumber(string.match(name, '^%d+'))
    items[number] = {id = id, state = load(id)}
  end
  end_leases(items, shared.probe)
  for _, item in ipairs(items) do
    item.state[DEATHS] = item.state[DEATHS] + 1
    give_back(item.id, item.state)
  end
end

-- Who is gone: proven, or silent; of the silent, those without leases are forgotten.
local gone, silent, any = {}, {}, false
for number = 5, #ARGV do
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

local late, stray, due = {}, 0, 0
if any then
  for _, name in ipairs(call('ZRANGE', LEASES, 0, -1)) do
    local owner = string.match(name, ':(.*)$')
    if gone[owner] or silent[owner] then
      if #late == most then break end
      late[#late + 1] = name
      if silent[owner] then stray = stray + 1 end
    end
  end
  reclaim(late)
  if #late < most then
    for _, owners in ipairs({gone, silent}) do
      for owner in pairs(owners) do
        call('HDEL', OWNERS, owner)
        call('ZREM', BEATS, owner)
      end
    end
  end
end
local reclaimed = #late
if now >= (shared.quiet_until or 0) and reclaimed < most then
  late = call('ZRANGEBYSCORE', LEASES, '-inf', text(now), 'LIMIT', 0, most - reclaimed)
  reclaim(late)
  reclaimed, stray = reclaimed + #late, stray + #late
end
if reclaimed > 0 then
  shared.lost = call('HINCRBY', CONTROL, 'lost', reclaimed)
  if stray > 0 then call('HINCRBY', CONTROL, 'stray', stray) end
end

for _, name in ipairs(call('ZRANGEBYSCORE', DELAYED, '-inf', text(now), 'LIMIT', 0, most)) do
  local id = tonumber(name)
  local state = load(id)
  call('ZREM', DELAYED, name)
  call('ZREM', DELAYED_ORDER, seat(id, state))
  give_back(id, state)
  due = due + 1
end
local next_due = call('ZRANGE', DELAYED, 0, 0, 'WITHSCORES')[2]
local more = (reclaimed == most or due == most) and 1 or 0
return {text(now), reclaimed, due, next_due or false, more, shared.lost, call('HKEYS', OWNERS)}
