-- Say what leases weigh, once their requests were read; give those back that there is no room for.
-- KEYS   own…
-- ARGV   owner, owner_timeout_s, lease_s, limit, read_at, lost, retry_after_max_s, units of the limit that
--        no lease counts, then per lease: id, token, units
-- Returns {facts, {1 it counts these units now, 0 it is no longer the caller's…}}
-- Keeps: the units of all leases never pass the limit because of it. What is given back was not delivered, keeps its
-- place, and is claimed next where there is room for all of it.
local me, timeout_s, lease_s = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now, shared = clock(), control()
open()
rewind(shared, now)
beat(me, now, timeout_s)
local free = (limit_by(shared, now, ARGV[4], ARGV[5], ARGV[6], ARGV[7]) or 0) - live_units(shared) - tonumber(ARGV[8])
local fits, back = {}, {}
for at = 9, #ARGV, 3 do
  local id, units = tonumber(ARGV[at]), tonumber(ARGV[at + 2])
  local state = held(id, ARGV[at + 1])
  local name = state and lease_name(id, state)
  local until_ = name and call('ZSCORE', LEASES, name)
  if not until_ then state = nil end
  local more = state and units - units_of(state)
  if not state then
    fits[#fits + 1] = 0
  elseif more > 0 and more > free then
    fits[#fits + 1] = 0
    free = free + units_of(state)
    back[#back + 1] = {id = id, state = state, units = units}
  else
    fits[#fits + 1] = 1
    if more ~= 0 then
      call('ZREM', LEASES, name)
      weigh(state, units)
      call('ZADD', LEASES, until_, lease_name(id, state))
      save(id, state)
      hold(state[OWNER], more, more)
      free = free - more
    end
  end
end
end_leases(back, shared.probe)
if call('HEXISTS', CONTROL, 'probe') == 0 then shared.probe, shared.prober = nil, nil end
for _, item in ipairs(back) do
  weigh(item.state, item.units)
  item.state[DELIVERIES] = item.state[DELIVERIES] - 1
  give_back(item.id, item.state)
end
return {facts(shared, now, me, lease_s), fits}
