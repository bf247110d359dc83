-- Write results and end their leases, or set the requests aside as dead.
-- KEYS   own…, reply record, default list
--        and where there is an offer the reply record of a claim by its nonce (owner, nonce)
-- ARGV   reply_s, ttl_s, foreign (1: markers of llm-d's producers are reached from here), dead_max, an offer to take what comes
--        next of their sequences (packed, as hand_over.lua has it; or empty), then per request:
--        id, token, how (0 no result, 1 push, 2 by the outbox), list, result,
--        request id (empty: its markers stay) and token, bury (0/1), reason, what it leaves to its sequence (packed, as
--        end_turn has it; or empty), and what the next of that is built on
-- Returns {now, dead ones dropped for dead_max, what was handed over (false: no offer; in a repeated reply how many, which a
--         claim by the same nonce tells), status per request…}
-- Keeps: a result is written exactly when its lease ends, in this one step, by the holder of its token only. In the same
-- step the next of its sequence may be claimed, or is handed over.
local REPLY = KEYS[OWN + 1]
local recorded = call('GET', REPLY)
if recorded then return cmsgpack.unpack(recorded) end
local reply_s, ttl_s, foreign, dead_max = ARGV[1], tonumber(ARGV[2]), ARGV[3] == '1', tonumber(ARGV[4])
local offer = ARGV[5] ~= '' and cmsgpack.unpack(ARGV[5])
local now, shared = clock(), offer and control()
local probe = call('HGET', CONTROL, 'probe')
local items, live, seen, ids, tokens = {}, {}, {}, {}, {}
for at = 6, #ARGV, 11 do
  local item = {id = tonumber(ARGV[at]), name = ARGV[at], how = tonumber(ARGV[at + 2]), list = ARGV[at + 3],
                result = ARGV[at + 4], request = ARGV[at + 5], request_token = ARGV[at + 6], bury = ARGV[at + 7] == '1',
                reason = ARGV[at + 8], told = told_of(ARGV[at + 9]), carried = ARGV[at + 10], status = LOST}
  items[#items + 1] = item
  ids[#ids + 1], tokens[#tokens + 1] = ARGV[at], ARGV[at + 1]
end
local sequences = {}
for number, packed in ipairs(#ids > 0 and call('HMGET', ENTRIES, unpack(ids)) or {}) do
  local item, state = items[number], packed and cmsgpack.unpack(packed)
  if state and not seen[item.id] and state[WHERE] == 'L' and state[TOKEN] == tokens[number] then
    seen[item.id], item.state = true, state
    live[#live + 1] = item
    if state[TURN] then sequences[#sequences + 1] = state[TURN][S_ID] end
    if item.told or state[TURN] then all() end
  end
end
if #sequences > 0 then know(sequences, call('HMGET', SEQUENCES, unpack(sequences))) end

local dropped, statuses, handed, record = 0, {text(now), 0, false}, false, {}
if #live > 0 then
  open()
  if offer then rewind(shared, now) end
  write_results(live, ttl_s, now)
  local ended, finished = {}, {}
  for _, item in ipairs(live) do
    if item.status == DONE then ended[#ended + 1] = item end
  end
  end_leases(ended, probe)
  if #ended > 0 then call('HINCRBY', CONTROL, 'settled', #ended) end
  for _, item in ipairs(ended) do
    end_turn(item.id, item.state, item.told, item.carried, now)
    if item.bury then
      local state = item.state
      state[WHERE], state[MOVES], state[REASON], state[DIED] = 'X', state[MOVES] + 1, item.reason, text(now)
      save(item.id, state)
      call('ZADD', DEAD, item.id, item.id)
      call('ZADD', DEAD_AGE, text(now), string.format('%016d', item.id))
    else
      finished[#finished + 1] = item.name
    end
    forget_markers(item, foreign, now)
  end
  forget(finished)
  if offer and of_all then
    handed, record = hand_over(offer, shared, now)
    if #record > 1 then call('SET', KEYS[OWN + 3], cmsgpack.pack(record), 'EX', reply_s) end
  elseif of_all then
    keep_turns(now)
  end
  while call('ZCARD', DEAD) > dead_max do
    local id = tonumber(call('ZPOPMIN', DEAD_AGE)[1])
    call('ZREM', DEAD, id)
    forget({id})
    dropped = dropped + 1
  end
end
statuses[2] = dropped
for _, item in ipairs(items) do statuses[#statuses + 1] = item.status end
if #live > 0 then
  statuses[3] = math.max(0, #record - 1)
  call('SET', REPLY, cmsgpack.pack(statuses), 'EX', reply_s)
end
statuses[3] = handed
return statuses
