-- Store the progress of released requests, and keep that of dead ones that enter the queue again.
-- Uses: common
-- Hooks: release, requeue_dead, settle_unleased
-- Columns releases: has_progress: flag, progress
-- With `has_progress`, `progress` replaces what is stored. An empty one deletes it.
local slices = features.slices

function slices.before_writes(items)
  for _, item in ipairs(items) do
    if item.has_progress or item.state and item.state[PROGRESS_BYTES] then
      features.check_types(slices)
      return
    end
  end
end

local function store_progress(id, state, progress)
  set_extra(state, PROGRESS_BYTES, #progress)
  call('HSET', PROGRESS, id, progress)
  call('HSET', CONTROL, slices.field, 1)
  features.record_stored(slices)
end

function slices.released(item, state)
  if not item.has_progress then return end
  if item.progress ~= '' then
    store_progress(item.id, state, item.progress)
    state[ATTEMPTS], state[REFUSALS] = 0, 0 -- they count for each slice
  elseif state[PROGRESS_BYTES] then
    redis.pcall('HDEL', PROGRESS, item.id)
    clear_extra(state, PROGRESS_BYTES)
  end
end

function slices.keep(id, state)
  local progress = state[PROGRESS_BYTES] and call('HGET', PROGRESS, id)
  if progress then
    return function(new_id, new_state) store_progress(new_id, new_state, progress) end
  end
end
