-- Set the units of leases once their requests were parsed, and return requests to the queue for which there is no
-- room.
-- Uses: owner_commands, common
-- Keys: queue
-- Arguments: owner, owner_timeout_s: number, lease_s: number, limit: number, read_at: number, lost_units: number,
--     retry_after_max_s: number, unleased_units: number
-- List leases: entry_id: number, token, units: number
-- `unleased_units` are units of the limit that no lease counts.
-- Returns {owner reply, {1 if the lease counts these units now, 0 if it is no longer the caller's…}}
-- Guarantees: the units of all leases never pass the limit because of this call. A returned request was not
-- delivered, keeps its place, and is claimed next when there is room for all of its units.
local now, shared = current_time(), load_control()
begin_writes()
correct_future_times(shared, now)
record_heartbeat(owner, now, owner_timeout_s)
local room = (share_and_get_limit(shared, now, limit, read_at, lost_units, retry_after_max_s) or 0)
  - count_live_units(shared) - unleased_units
local fits, returned = {}, {}
for _, lease in ipairs(leases) do
  local id, units = lease.entry_id, lease.units
  local state = load_leased(id, lease.token)
  local name = state and lease_name(id, state)
  local until_ = name and call('ZSCORE', LEASES, name)
  if not until_ then state = nil end
  local extra = state and units - get_units(state)
  if not state then
    fits[#fits + 1] = 0
  elseif extra > 0 and extra > room then
    fits[#fits + 1] = 0
    room = room + get_units(state)
    returned[#returned + 1] = {id = id, state = state, units = units}
  else
    fits[#fits + 1] = 1
    if extra ~= 0 then
      call('ZREM', LEASES, name)
      set_units(state, units)
      call('ZADD', LEASES, until_, lease_name(id, state))
      save_entry(id, state)
      add_owner_units(state[OWNER], extra, extra)
      room = room - extra
    end
  end
end
end_leases(returned, shared.probe)
if call('HEXISTS', CONTROL, 'probe') == 0 then shared.probe, shared.prober = nil, nil end
for _, item in ipairs(returned) do
  set_units(item.state, item.units)
  item.state[DELIVERIES] = item.state[DELIVERIES] - 1
  return_to_queue(item.id, item.state)
end
return {build_owner_reply(shared, now, owner, lease_s), fits}
