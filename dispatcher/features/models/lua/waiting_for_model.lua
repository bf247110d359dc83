-- Move requests into the lane of requests whose model is not served, and out of it.
-- Uses: common, byte_order, cancel_markers
-- Hooks: release, settle_unleased, sweep
-- Columns releases: missing_model
-- A released request that waits for its `missing_model` has no delay, and can be cancelled there by `request_id` and
-- `request_token`. With an empty `missing_model`, it waits for none.
local models = features.models
local WAIT_MODEL, WAIT_TOKEN = 1, 3

function models.before_writes(items)
  for _, item in ipairs(items) do
    if item.state and item.state[MODEL_WAIT] or item.missing_model and item.missing_model ~= '' then
      features.check_types(models)
      return
    end
  end
end

function models.name_prefix(model) return string.format('%03d', #model) .. model end
local function order_name(id, state)
  return models.name_prefix(state[MODEL_WAIT][WAIT_MODEL]) .. ':'
    .. sortable_score(state[SCORE]) .. string.format('%016d', id)
end

local function add_to_count(model, delta)
  if tonumber(call('ZADD', WAITING_FOR_MODEL_COUNTS, 'INCR', delta, model)) <= 0 then
    call('ZREM', WAITING_FOR_MODEL_COUNTS, model)
  end
end

-- Put a released entry into the lane if its model is missing. Return whether it is there.
function models.take_place(item, state)
  if item.missing_model == '' then return false end
  set_extra(state, MODEL_WAIT, {item.missing_model, item.request_id, item.request_token})
  call('ZADD', WAITING_FOR_MODEL_ORDER, 0, order_name(item.id, state))
  add_to_count(item.missing_model, 1)
  features.record_stored(models)
  return_to_queue(item.id, state)
  return true
end

-- Forget that an entry waits for a model, if it does. The caller removes it from the set of the lane.
function models.removed(id, state)
  if not state[MODEL_WAIT] then return end
  call('ZREM', WAITING_FOR_MODEL_ORDER, order_name(id, state))
  add_to_count(state[MODEL_WAIT][WAIT_MODEL], -1)
  clear_extra(state, MODEL_WAIT)
end

-- Return an entry to the place where it would wait if its model had been served.
function models.return_entry(id, state)
  call('ZREM', WAITING_FOR_MODEL, ordered_name(id, state))
  models.removed(id, state)
  return_to_queue(id, state)
end

-- Return cancelled requests to the queue, where they are claimed and answered. Each sweep checks some requests, from
-- the one after the last request of the previous sweep on. Returns the number of returned requests. `foreign`: also
-- look at the markers of llm-d's producers, which are in the same slot.
function models.swept(_, foreign)
  if not models.is_used then return 0 end
  local max_count = MAX_CANCEL_CHECKS_PER_SWEEP
  local field = 'checked:' .. PENDING
  local after = call('HGET', CONTROL, field)
  local low = after and '(' .. after or '-'
  local names = call('ZRANGE', WAITING_FOR_MODEL_ORDER, low, '+', 'BYLEX', 'LIMIT', 0, max_count)
  if #names == max_count then call('HSET', CONTROL, field, names[max_count])
  elseif after then call('HDEL', CONTROL, field) end
  if #names == 0 then return 0 end
  local ids, returned = {}, 0
  for number, name in ipairs(names) do ids[number] = tonumber(string.sub(name, -16)) end
  for number, packed in ipairs(call('HMGET', ENTRIES, unpack(ids))) do
    local state = packed and cmsgpack.unpack(packed)
    if state and state[MODEL_WAIT] and state[MODEL_WAIT][WAIT_TOKEN] ~= '' then
      local _, request_id, token = unpack(state[MODEL_WAIT])
      if marker_equals(cancel_key(request_id, token), token)
        or foreign and marker_equals('request-cancel:' .. request_id, token) then
        models.return_entry(ids[number], state)
        returned = returned + 1
      end
    end
  end
  return returned
end
