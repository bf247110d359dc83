-- Write the results of unleased requests and remove the requests: those past their deadline, and the remaining
-- requests of closed runs of sequences.
-- Uses: owner_commands, common, cancel_markers, write_results, sequences, waiting_for_model
-- Keys: queue, REPLY, DEFAULT_LIST
-- Arguments: reply_s, ttl_s: number, foreign: flag
-- List items: delivery: number, list, result, request_id, request_token, turn_end: packed, conversation, location,
--     member
-- All but `location` and `member` is as in settle.lua.
-- Returns {status per request (DONE, LOST if the request has moved, BAD_LIST, UNWRITABLE)…}
-- Guarantees: a result is written exactly when its request is removed, and only if the request is still where it was
-- found.
local recorded = call('GET', REPLY)
if recorded then return cmsgpack.unpack(recorded) end
local now = current_time()
local SETS = {D = DELAYED_ORDER}
for number, letter in ipairs(WAITING_LETTERS) do SETS[letter] = WAITING_SETS[number] end
local live, seen, has_started = {}, {}, false
for _, item in ipairs(items) do
  item.status = LOST
  local is_there
  if item.location == 'P' then
    is_there = call('ZSCORE', PENDING, item.member)
  else
    local letter, id, moves = string.match(item.location, '^(%a):(%d+):(%d+)$')
    local state = load_entry(tonumber(id))
    is_there = state and state[LOCATION] == letter and state[MOVES] == tonumber(moves)
    item.id, item.state = tonumber(id), state
  end
  local name = item.location == 'P' and item.member or item.location
  if is_there and not seen[name] then
    seen[name] = true
    live[#live + 1] = item
    if item.turn_end or item.state and item.state[SLOT] then load_shared() end
    if item.state and item.state[MODEL_WAIT] then waiting_models.check_types() end
    has_started = has_started or item.state and item.state[PROGRESS_BYTES]
  end
end

if #live > 0 then
  if has_started then check_progress_types()
  elseif shared_state then check_progress_types_if_used() end -- the turn of an entry with progress may come
  begin_writes()
  write_results(live, ttl_s, now)
  for _, item in ipairs(live) do
    if item.status == DONE then
      if item.state and item.state[SLOT] then -- the end of an earlier item may have made it the next request
        return_ready_entries()
        item.state = load_entry(item.id)
      end
      if item.state then
        call('ZREM', SETS[item.state[LOCATION]], ordered_name(item.id, item.state))
        if item.state[LOCATION] == 'D' then call('ZREM', DELAYED, string.format('%016d', item.id)) end
        if item.state[MODEL_WAIT] then waiting_models.remove_entry(item.id, item.state) end
        delete_entries({item.id}, item.state[PROGRESS_BYTES] and {item.id} or {})
      else
        call('ZREM', PENDING, item.member)
      end
      end_turn(item.id, item.state, item.turn_end, item.conversation, now)
      delete_markers(item, foreign, now)
    end
  end
  if shared_state then write_sequences(now) end
end
local statuses = {}
for number, item in ipairs(items) do statuses[number] = item.status end
if #live > 0 then call('SET', REPLY, cmsgpack.pack(statuses), 'EX', reply_s) end
return statuses
