-- Extend leases, and exchange the shared state of the owners.
-- KEYS   common keys…
-- ARGV   owner, owner_timeout_s, lease_s, number of leases, (id, token)…, then nothing, or limit, read_at, lost,
--        retry_after_max_s, then nothing, or of an overload: refused at, retry at, out of capacity (0/1), in flight
-- Returns {owner reply, {ids of leases that are no longer the caller's}}
-- Guarantees: only the token of a lease renews it, and no abandoned lease is renewed. The newest overload is kept.
-- Its `retry at` never moves back, except that it is cut to retry_after_max_s after the refusal.
local owner, timeout_s, lease_s, count = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local now, shared = current_time(), load_control()
local lost = {}
begin_writes()
correct_future_times(shared, now)
record_heartbeat(owner, now, timeout_s)
for number = 0, count - 1 do
  local id, token = tonumber(ARGV[5 + 2 * number]), ARGV[6 + 2 * number]
  local state = load_leased(id, token)
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
local at = 5 + 2 * count
if ARGV[at] then
  update_shared_limit(shared, tonumber(ARGV[at]), effective_read_at(ARGV[at + 1], now), tonumber(ARGV[at + 2]))
end
if ARGV[at + 4] then
  local refused_at, retry_at = tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5])
  if refused_at > now + CLOCK_STEP_S then refused_at, retry_at = now, now + retry_at - refused_at end
  shared.overload_until = math.max(retry_at, shared.overload_until or retry_at)
  if not shared.overload_at or refused_at >= shared.overload_at then
    shared.overload_at = refused_at
    shared.overload_capacity, shared.overload_in_flight = tonumber(ARGV[at + 6]), tonumber(ARGV[at + 7])
  end
  shared.overload_until = bounded_retry_at(shared, tonumber(ARGV[at + 3]))
  call('HSET', CONTROL, 'overload_at', format_float(shared.overload_at), 'overload_until',
       format_float(shared.overload_until), 'overload_capacity', shared.overload_capacity, 'overload_in_flight',
       shared.overload_in_flight)
end
return {build_owner_reply(shared, now, owner, lease_s), lost}
