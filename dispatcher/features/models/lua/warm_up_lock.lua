-- Take or renew the warm-up lock of a version at an endpoint, or release it, with or without marking the version
-- warm.
-- Uses: require_commands, time, model_registry
-- Keys: models
-- Arguments: action, warm_name, prefix, own_name
-- `action` is take, warm or back. `warm_name` has version and endpoint as they are in WARM_MARKERS, `prefix` is the
-- beginning of their names in WARM_UP_LOCKS, and `own_name` is the name of the owner's lock there.
-- Returns 1, or 0 if another owner has the lock or another program has taken the key
-- Guarantees: one owner at a time has the lock, for WARM_UP_LOCK_S after it was taken or renewed.
require_commands('TYPE', 'TIME', 'EXPIRE', 'ZADD', 'ZREM', 'ZRANGE', 'ZRANGEBYSCORE')
local now, is_free = current_time(), is_own_key(WARM_UP_LOCKS)
if is_free then drop_expired(WARM_UP_LOCKS, now, WARM_UP_LOCK_S) end
if action == 'take' then
  if not is_free then return 0 end
  for _, name in ipairs(call('ZRANGE', WARM_UP_LOCKS, 0, -1)) do
    if name ~= own_name and starts_with(name, prefix) then return 0 end
  end
  set_until(WARM_UP_LOCKS, now, WARM_UP_LOCK_S, {own_name})
  return 1
end
if is_free then call('ZREM', WARM_UP_LOCKS, own_name) end
if action == 'warm' and is_own_key(WARM_MARKERS) then set_until(WARM_MARKERS, now, WARM_MARKER_S, {warm_name}) end
return 1
