-- Refresh the warm markers of an owner, record which models it uses, and return the model registry.
-- KEYS   WARM…
-- ARGV   the beginning of the owner's names in USED (empty: only read), number of markers to keep, number of markers
--        to remove, then these markers, and the models in use as they are in USED
-- Returns {WARM…}, {USED…}, {LABELS, when…}, {DRAINS, when…}, {keys that another program has taken…}, {WARMING…}
-- Guarantees: a marker that was removed or has expired does not come back by a refresh. With an empty owner, only
-- reads.
local owner_prefix, kept_count, removed_count = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if owner_prefix ~= '' then require_commands('TYPE', 'TIME', 'EXPIRE', 'ZADD', 'ZREM', 'ZRANGE', 'ZRANGEBYSCORE') end
local now = current_time()

local function take_arguments(first, count)
  local found = {}
  for at = first, first + count - 1 do found[#found + 1] = ARGV[at] end
  return found
end
local function read_current(set)
  return call('ZRANGEBYSCORE', set, '(' .. format_float(now), '+inf', 'LIMIT', 0, MARKS_MOST)
end
local function read_decisions(set) return call('ZRANGE', set, -DECIDED_MOST, -1, 'WITHSCORES') end

local found = {{}, {}, {}, {}, problems, {}}
if is_own_key(1) then
  if owner_prefix ~= '' then
    drop_expired(WARM, now, WARM_S)
    set_until(WARM, now, WARM_S, take_arguments(4, kept_count), 'XX')
    remove_members(WARM, take_arguments(4 + kept_count, removed_count))
  end
  found[1] = read_current(WARM)
end
if is_own_key(2) then
  if owner_prefix ~= '' then drop_expired(WARMING, now, WARMING_S) end
  found[6] = read_current(WARMING)
end
if is_own_key(3) then
  if owner_prefix ~= '' then
    local in_use, previous =
      take_arguments(4 + kept_count + removed_count, #ARGV - 3 - kept_count - removed_count), {}
    for _, name in ipairs(call('ZRANGE', USED, 0, -1)) do
      if starts_with(name, owner_prefix) then previous[#previous + 1] = name end
    end
    drop_expired(USED, now, USED_S)
    remove_members(USED, previous)
    set_until(USED, now, USED_S, in_use)
  end
  found[2] = read_current(USED)
end
if is_own_key(4) then found[3] = read_decisions(LABELS) end
if is_own_key(5) then found[4] = read_decisions(DRAINS) end
-- These two are not read here, but their problems are part of the reply.
is_own_key(6)
is_own_key(7)
return found
