-- Extend leases, and exchange the shared state of the owners.
-- Uses: owner_commands, common
-- Keys: queue
-- Arguments: owner, owner_timeout_s: number, lease_s: number, limit: number?, read_at: number?, lost_units: number?,
--     retry_after_max_s: number?, refused_at: number?, retry_at: number?, is_out_of_capacity: number?,
--     in_flight: number?
-- List leases: entry_id: number, token
-- Without a permit of the owner, `limit` and what follows is nil. Without an overload, `refused_at` and what follows
-- is nil.
-- Returns {owner reply, {ids of leases that are no longer the caller's}}
-- Guarantees: only the token of a lease renews it, and no abandoned lease is renewed. The newest overload is kept.
-- Its `retry at` never moves back, except that it is cut to retry_after_max_s after the refusal.
local now, shared = current_time(), load_control()
local lost = {}
begin_writes()
correct_future_times(shared, now)
record_heartbeat(owner, now, owner_timeout_s)
for _, lease in ipairs(leases) do
  local id = lease.entry_id
  local state = load_leased(id, lease.token)
  local name = state and lease_name(id, state)
  -- ZADD changes nothing if a lease is renewed twice in one microsecond, and if it is abandoned. ZSCORE tells these
  -- two cases apart.
  if name and (call('ZADD', LEASES, 'XX', 'CH', format_float(now + lease_s), name) == 1
    or call('ZSCORE', LEASES, name)) then
    -- The lease is the caller's for lease_s from now on.
  else
    lost[#lost + 1] = id
  end
end
if limit then update_shared_limit(shared, limit, effective_read_at(read_at, now), lost_units) end
if refused_at then
  if refused_at > now + CLOCK_STEP_S then refused_at, retry_at = now, now + retry_at - refused_at end
  shared.overload_until = math.max(retry_at, shared.overload_until or retry_at)
  if not shared.overload_at or refused_at >= shared.overload_at then
    shared.overload_at = refused_at
    shared.overload_capacity, shared.overload_in_flight = is_out_of_capacity, in_flight
  end
  shared.overload_until = bounded_retry_at(shared, retry_after_max_s)
  call('HSET', CONTROL, 'overload_at', format_float(shared.overload_at), 'overload_until',
       format_float(shared.overload_until), 'overload_capacity', shared.overload_capacity, 'overload_in_flight',
       shared.overload_in_flight)
end
return {build_owner_reply(shared, now, owner, lease_s), lost}
