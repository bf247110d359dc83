-- Refresh the warm markers of an owner, record which models it uses, and return the model registry.
-- Uses: require_commands, time, model_registry
-- Keys: models
-- Arguments: owner_prefix
-- List kept: text
-- List removed: text
-- List in_use: text
-- `owner_prefix` is the beginning of the owner's names in MODELS_IN_USE; an empty one means to read only. `kept` and
-- `removed` are names in WARM_MARKERS, and `in_use` are names in MODELS_IN_USE.
-- Returns {WARM_MARKERS…}, {MODELS_IN_USE…}, {LABELS, when…}, {DRAINS, when…}, {keys that another program has taken…},
--         {WARM_UP_LOCKS…}
-- Guarantees: a marker that was removed or has expired does not come back by a refresh. With an empty owner, only
-- reads.
if owner_prefix ~= '' then require_commands('TYPE', 'TIME', 'EXPIRE', 'ZADD', 'ZREM', 'ZRANGE', 'ZRANGEBYSCORE') end
local now = current_time()

local function read_current(set)
  return call('ZRANGEBYSCORE', set, '(' .. format_float(now), '+inf', 'LIMIT', 0, MAX_MARKERS)
end
local function read_decisions(set) return call('ZRANGE', set, -MAX_LABELS_OR_DRAINS, -1, 'WITHSCORES') end

local found = {{}, {}, {}, {}, problems, {}}
if is_own_key(WARM_MARKERS) then
  if owner_prefix ~= '' then
    drop_expired(WARM_MARKERS, now, WARM_MARKER_S)
    set_until(WARM_MARKERS, now, WARM_MARKER_S, kept, 'XX')
    remove_members(WARM_MARKERS, removed)
  end
  found[1] = read_current(WARM_MARKERS)
end
if is_own_key(WARM_UP_LOCKS) then
  if owner_prefix ~= '' then drop_expired(WARM_UP_LOCKS, now, WARM_UP_LOCK_S) end
  found[6] = read_current(WARM_UP_LOCKS)
end
if is_own_key(MODELS_IN_USE) then
  if owner_prefix ~= '' then
    local previous = {}
    for _, name in ipairs(call('ZRANGE', MODELS_IN_USE, 0, -1)) do
      if starts_with(name, owner_prefix) then previous[#previous + 1] = name end
    end
    drop_expired(MODELS_IN_USE, now, MODEL_IN_USE_S)
    remove_members(MODELS_IN_USE, previous)
    set_until(MODELS_IN_USE, now, MODEL_IN_USE_S, in_use)
  end
  found[2] = read_current(MODELS_IN_USE)
end
if is_own_key(LABELS) then found[3] = read_decisions(LABELS) end
if is_own_key(DRAINS) then found[4] = read_decisions(DRAINS) end
-- These two are not read here, but their problems are part of the reply.
is_own_key(PINS)
is_own_key(PINS_LAST_USED)
return found
