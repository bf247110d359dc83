-- Write the results of unleased requests and remove the requests: those past their deadline, and those that a feature
-- has given up.
-- Uses: owner_commands, common, cancel_markers, write_results
-- Keys: queue, REPLY, DEFAULT_LIST
-- Arguments: reply_s, ttl_s: number, foreign: flag
-- List items: delivery: number, list, result, request_id, request_token, location, member
-- All but `location` and `member` is as in settle.lua.
-- Returns {status per request (DONE, LOST if the request has moved, BAD_LIST, UNWRITABLE)…}
-- Guarantees: a result is written exactly when its request is removed, and only if the request is still where it was
-- found.
local recorded = call('GET', REPLY)
if recorded then return cmsgpack.unpack(recorded) end
local now = current_time()
local SETS = {D = DELAYED_ORDER}
for number, letter in ipairs(WAITING_LETTERS) do SETS[letter] = WAITING_SETS[number] end
local live, seen = {}, {}
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
  end
end

if #live > 0 then
  features.call('before_writes', live)
  begin_writes()
  write_results(live, ttl_s, now)
  for _, item in ipairs(live) do
    if item.status == DONE then
      if item.state then features.call('refresh', item) end
      if item.state then
        call('ZREM', SETS[item.state[LOCATION]], ordered_name(item.id, item.state))
        if item.state[LOCATION] == 'D' then call('ZREM', DELAYED, string.format('%016d', item.id)) end
        features.call('removed', item.id, item.state)
        delete_entries({item})
      else
        call('ZREM', PENDING, item.member)
      end
      features.call('ended', item, now)
      delete_markers(item, foreign, now)
    end
  end
  features.call('flush', now)
end
local statuses = {}
for number, item in ipairs(items) do statuses[number] = item.status end
if #live > 0 then call('SET', REPLY, cmsgpack.pack(statuses), 'EX', reply_s) end
return statuses
