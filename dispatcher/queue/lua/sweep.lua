-- Take back leases that ran out, and bring back what is due.
-- KEYS   own…
-- ARGV   lease_s, most of each kind
-- Returns {now, reclaimed, due, when the next is due or false, 1 if there is more to do}
-- Keeps: nothing is reclaimed within lease_s/3 after a gap between sweeps longer than that (the queue was
-- away, all owners were, or its clock jumped forward): living owners renew first. When the clock jumps back,
-- every time kept here moves back with it.
local lease_s, most = tonumber(ARGV[1]), tonumber(ARGV[2])
local now, shared = clock(), control()
local calm_s = lease_s / 3
open()

local function shift(key, by)
  local found = call('ZRANGE', key, 0, 9999, 'WITHSCORES')
  for at = 1, #found, 2 do call('ZADD', key, 'XX', text(tonumber(found[at + 1]) + by), found[at]) end
end
if shared.tick and now < shared.tick - 1 then
  local by = now - shared.tick
  shift(LEASES, by)
  shift(DELAYED, by)
  for _, name in ipairs({'read_at', 'overload_at', 'overload_until', 'quiet_until'}) do
    if shared[name] then
      shared[name] = shared[name] + by
      call('HSET', CONTROL, name, text(shared[name]))
    end
  end
elseif shared.tick and now - shared.tick > calm_s then
  shared.quiet_until = now + calm_s
  call('HSET', CONTROL, 'quiet_until', text(shared.quiet_until))
end
call('HSET', CONTROL, 'tick', text(now))

local late, due = {}, 0
if now >= (shared.quiet_until or 0) then
  for _, name in ipairs(call('ZRANGEBYSCORE', LEASES, '-inf', text(now), 'LIMIT', 0, most)) do
    local id = tonumber(string.match(name, '^%d+'))
    late[#late + 1] = {id = id, state = load(id)}
  end
  end_leases(late, shared.probe)
  for _, item in ipairs(late) do
    item.state[DEATHS] = item.state[DEATHS] + 1
    give_back(item.id, item.state)
  end
  if #late > 0 then call('HINCRBY', CONTROL, 'lost', #late) end
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
return {text(now), #late, due, next_due or false, (#late == most or due == most) and 1 or 0}
