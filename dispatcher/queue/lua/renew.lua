-- Give leases more time, and tell and learn what the owners share.
-- KEYS   own…
-- ARGV   owner, owner_timeout_s, lease_s, number of leases, (id, token)…, then nothing, or
--        limit, read_at, lost, retry_after_max_s, then nothing, or overload at, until, capacity (0/1), in_flight
-- Returns {facts, {lost ids}}
-- Keeps: only the holder's token renews, and no lease that was abandoned. The newest overload stays; its `until` never
-- moves back, but for what lies further from it than retry_after_max_s.
local me, timeout_s, lease_s, count = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local now, shared = clock(), control()
local lost = {}
open()
rewind(shared, now)
beat(me, now, timeout_s)
for number = 0, count - 1 do
  local id, token = tonumber(ARGV[5 + 2 * number]), ARGV[6 + 2 * number]
  local state = held(id, token)
  local name = state and lease_name(id, state)
  -- Nothing changes where it is renewed twice in a microsecond, and where it is abandoned.
  if name and (call('ZADD', LEASES, 'XX', 'CH', text(now + lease_s), name) == 1 or call('ZSCORE', LEASES, name)) then
    -- It is the caller's for that long.
  else
    lost[#lost + 1] = id
  end
end
local at = 5 + 2 * count
if ARGV[at] then adopt(shared, tonumber(ARGV[at]), read_time(ARGV[at + 1], now), tonumber(ARGV[at + 2])) end
if ARGV[at + 4] then
  local seen, untl = tonumber(ARGV[at + 4]), tonumber(ARGV[at + 5])
  if seen > now + AHEAD_S then seen, untl = now, now + untl - seen end
  shared.overload_until = math.max(untl, shared.overload_until or untl)
  if not shared.overload_at or seen >= shared.overload_at then
    shared.overload_at = seen
    shared.overload_capacity, shared.overload_in_flight = tonumber(ARGV[at + 6]), tonumber(ARGV[at + 7])
  end
  shared.overload_until = wait_until(shared, tonumber(ARGV[at + 3]))
  call('HSET', CONTROL, 'overload_at', text(shared.overload_at), 'overload_until', text(shared.overload_until),
       'overload_capacity', shared.overload_capacity, 'overload_in_flight', shared.overload_in_flight)
end
return {facts(shared, now, me, lease_s), lost}
