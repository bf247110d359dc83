-- Requests whose model is not served: they wait in a lane of their own (core/requests/lanes.py, ABSENT), at no cost to others.
--
-- ABSENT         the lane, by score, as every lane has it
-- ABSENT_ORDER   the same by model, in the order of bytes: '<how long the name is, 3 digits><model>:<score, 16 hex digits>
--                <entry, 16 digits>'. So the best of a model are read without looking at those of others, and no name is
--                the beginning of another one's.
-- ABSENT_COUNTS  models, by how many wait for each
--
-- AWAITS in the state of an entry: the model, and what cancels it (request id and token, empty: nothing does).
-- (One local of a script, which may have 200.)
local models = {}
do
  local A_MODEL, A_REQUEST, A_TOKEN = 1, 2, 3

  -- Who may come to write asks for it before any write.
  function models.checked() check_types(OF_MODELS + 1, OWN) end

  -- Doubles as text in the order of their size (digits and a to f, which every locale sorts alike).
  local function sortable(score)
    local bytes, hex = struct.pack('>d', number_of(score) + 0), {}
    local negative = string.byte(bytes) >= 128
    for at = 1, 8 do
      local byte = string.byte(bytes, at)
      hex[at] = string.format('%02x', negative and 255 - byte or at == 1 and byte + 128 or byte)
    end
    return table.concat(hex)
  end

  function models.part_of(model) return string.format('%03d', #model) .. model end
  local function place_of(id, state)
    return models.part_of(state[AWAITS][A_MODEL]) .. ':' .. sortable(state[SCORE]) .. string.format('%016d', id)
  end

  local function count_awaited(model, by)
    if tonumber(call('ZADD', ABSENT_COUNTS, 'INCR', by, model)) <= 0 then call('ZREM', ABSENT_COUNTS, model) end
  end

  -- An entry that is no longer leased goes into the lane. (An array without holes: see `weigh`.)
  function models.wait(id, state, model, request, token)
    state[REASON], state[DIED], state[UNITS] = state[REASON] or '', state[DIED] or '', units_of(state)
    state[TURN] = state[TURN] or false
    state[AWAITS] = {model, request, token}
    call('ZADD', ABSENT_ORDER, 0, place_of(id, state))
    count_awaited(model, 1)
    give_back(id, state)
  end

  -- An entry that leaves the lane, whose set the caller takes it from, is not awaited any more.
  function models.forget(id, state)
    call('ZREM', ABSENT_ORDER, place_of(id, state))
    count_awaited(state[AWAITS][A_MODEL], -1)
    state[AWAITS] = nil
  end

  -- Back to where it would wait if its model had been there.
  function models.call_back(id, state)
    call('ZREM', ABSENT, name_in_order(id, state))
    models.forget(id, state)
    give_back(id, state)
  end

  -- Those of the lane that were cancelled come back, to be answered: of so many that are looked at, behind those of the last
  -- look. How many that were. `foreign`: markers of llm-d's producers can be reached from here, too.
  function models.call_back_cancelled(most, foreign)
    local field = 'looked:' .. PENDING
    local from = call('HGET', CONTROL, field)
    local places = call('ZRANGE', ABSENT_ORDER, from and '(' .. from or '-', '+', 'BYLEX', 'LIMIT', 0, most)
    if #places == most then call('HSET', CONTROL, field, places[most])
    elseif from then call('HDEL', CONTROL, field) end
    if #places == 0 then return 0 end
    local ids, back = {}, 0
    for number, place in ipairs(places) do ids[number] = tonumber(string.sub(place, -16)) end
    for number, packed in ipairs(call('HMGET', ENTRIES, unpack(ids))) do
      local state = packed and cmsgpack.unpack(packed)
      if state and state[AWAITS] and state[AWAITS][A_TOKEN] ~= '' then
        local _, request, token = unpack(state[AWAITS])
        if holds(cancel_key(request, token), token) or foreign and holds('request-cancel:' .. request, token) then
          models.call_back(ids[number], state)
          back = back + 1
        end
      end
    end
    return back
  end
end
