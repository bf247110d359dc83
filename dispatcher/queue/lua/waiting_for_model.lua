-- Requests whose model is not served. They wait in a lane of their own (core/requests/lanes.py), at no cost to other
-- requests.
-- Uses: common, byte_order, cancel_markers
--
-- WAITING_FOR_MODEL         the lane, by score, like every lane
-- WAITING_FOR_MODEL_ORDER   the same entries by model, in the order of bytes: '<length of the name, 3 digits><model>:
--                           <score, 16 hexadecimal digits><entry, 16 digits>'. The first requests of a model are found
--                           without reading those of other models, and no name is the beginning of another name.
-- WAITING_FOR_MODEL_COUNTS  the models, by the number of requests that wait for each
--
-- MODEL_WAIT in the state of an entry has the name of the model, and the request id and token by which the request
-- can be cancelled (empty if it cannot). All functions are in one table, because a script may have 200 locals.
local waiting_models = {}
do
  local WAIT_MODEL, WAIT_REQUEST, WAIT_TOKEN = 1, 2, 3

  -- Check the types of the keys. A script that may write here calls this before its first write.
  function waiting_models.check_types() check_types(WAITING_FOR_MODEL_START + 1, PROGRESS_START) end

  function waiting_models.name_prefix(model) return string.format('%03d', #model) .. model end
  local function order_name(id, state)
    return waiting_models.name_prefix(state[MODEL_WAIT][WAIT_MODEL]) .. ':'
      .. sortable_score(state[SCORE]) .. string.format('%016d', id)
  end

  local function add_to_count(model, delta)
    if tonumber(call('ZADD', WAITING_FOR_MODEL_COUNTS, 'INCR', delta, model)) <= 0 then
      call('ZREM', WAITING_FOR_MODEL_COUNTS, model)
    end
  end

  -- Put an entry that is no longer leased into the lane. The array of its state must have no holes (see `set_units`).
  function waiting_models.add_entry(id, state, model, request_id, token)
    state[REASON], state[DIED_AT], state[UNITS] = state[REASON] or '', state[DIED_AT] or '', get_units(state)
    state[SLOT] = state[SLOT] or false
    state[MODEL_WAIT] = {model, request_id, token}
    call('ZADD', WAITING_FOR_MODEL_ORDER, 0, order_name(id, state))
    add_to_count(model, 1)
    return_to_queue(id, state)
  end

  -- Forget that an entry waits for a model. The caller removes it from the set of the lane.
  function waiting_models.remove_entry(id, state)
    call('ZREM', WAITING_FOR_MODEL_ORDER, order_name(id, state))
    add_to_count(state[MODEL_WAIT][WAIT_MODEL], -1)
    state[MODEL_WAIT] = nil
    if state[PROGRESS_BYTES] then state[MODEL_WAIT] = false end -- the array must have no holes
  end

  -- Return an entry to the place where it would wait if its model had been served.
  function waiting_models.return_entry(id, state)
    call('ZREM', WAITING_FOR_MODEL, ordered_name(id, state))
    waiting_models.remove_entry(id, state)
    return_to_queue(id, state)
  end

  -- Return cancelled requests to the queue, where they are claimed and answered. Each call checks `max_count`
  -- requests, from the one after the last request of the previous call on. Returns the number of returned requests.
  -- `foreign`: also look at the markers of llm-d's producers, which are in the same slot.
  function waiting_models.return_cancelled(max_count, foreign)
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
          waiting_models.return_entry(ids[number], state)
          returned = returned + 1
        end
      end
    end
    return returned
  end
end
