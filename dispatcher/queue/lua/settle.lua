-- Write results and end their leases, or move the requests to the dead-letter set.
-- KEYS   common keys…, reply record, default list; with an offer also the reply record of a claim by its nonce (owner,
--        nonce)
-- ARGV   reply_s, ttl_s, foreign (1: the markers of llm-d's producers can be reached from here), dead_max, an offer
--        to claim the next requests of the sequences (packed, see claim_next.lua; or empty), then per request: id,
--        token, delivery (0: no result, 1: push, 2: outbox), list, result, request id (empty: its markers stay) and
--        request token, dead-letter (0: no, 1: yes, 2: yes, and the last attempt counts as a failed one), reason, turn
--        end (packed, see `end_turn`; or empty), conversation
-- Returns {now, dead requests dropped for dead_max, what was claimed (false: no offer; in a repeated reply the number
--         of leases, which a claim by the same nonce returns), status per request…}
-- Guarantees: a result is written exactly when its lease ends, in this one step, and only by the holder of its token.
-- In the same step, the next request of its sequence becomes claimable, or is claimed.
local REPLY = KEYS[KEY_COUNT + 1]
local recorded = call('GET', REPLY)
if recorded then return cmsgpack.unpack(recorded) end
local reply_s, ttl_s, foreign, dead_max = ARGV[1], tonumber(ARGV[2]), ARGV[3] == '1', tonumber(ARGV[4])
local offer = ARGV[5] ~= '' and cmsgpack.unpack(ARGV[5])
local now, shared = current_time(), offer and load_control()
local probe = call('HGET', CONTROL, 'probe')
local items, live, seen, ids, tokens = {}, {}, {}, {}, {}
for at = 6, #ARGV, 11 do
  local item = {
    id = tonumber(ARGV[at]), name = ARGV[at], delivery = tonumber(ARGV[at + 2]), list = ARGV[at + 3],
    result = ARGV[at + 4], request = ARGV[at + 5], request_token = ARGV[at + 6], dead_letter = ARGV[at + 7] ~= '0',
    is_failed_attempt = ARGV[at + 7] == '2', reason = ARGV[at + 8],
    turn_end = unpack_turn_end(ARGV[at + 9]), conversation = ARGV[at + 10], status = LOST,
  }
  items[#items + 1] = item
  ids[#ids + 1], tokens[#tokens + 1] = ARGV[at], ARGV[at + 1]
end
local sequences = {}
for number, packed in ipairs(#ids > 0 and call('HMGET', ENTRIES, unpack(ids)) or {}) do
  local item, state = items[number], packed and cmsgpack.unpack(packed)
  if state and not seen[item.id] and state[LOCATION] == 'L' and state[TOKEN] == tokens[number] then
    seen[item.id], item.state = true, state
    live[#live + 1] = item
    if state[SLOT] then sequences[#sequences + 1] = state[SLOT][SLOT_SEQUENCE] end
    if item.turn_end or state[SLOT] then load_shared() end
  end
end
if #sequences > 0 then cache_sequences(sequences, call('HMGET', SEQUENCES, unpack(sequences))) end

local dropped, statuses, claimed_next, record = 0, {format_float(now), 0, false}, false, {}
if #live > 0 then
  begin_writes()
  if offer then correct_future_times(shared, now) end
  write_results(live, ttl_s, now)
  local ended, finished = {}, {}
  for _, item in ipairs(live) do
    if item.status == DONE then ended[#ended + 1] = item end
  end
  end_leases(ended, probe)
  if #ended > 0 then call('HINCRBY', CONTROL, 'settled', #ended) end
  for _, item in ipairs(ended) do
    end_turn(item.id, item.state, item.turn_end, item.conversation, now)
    if item.dead_letter then
      local state = item.state
      state[LOCATION], state[MOVES], state[REASON], state[DIED_AT] =
        'X', state[MOVES] + 1, item.reason, format_float(now)
      if item.is_failed_attempt then state[ATTEMPTS] = state[ATTEMPTS] + 1 end
      save_entry(item.id, state)
      call('ZADD', DEAD, item.id, item.id)
      call('ZADD', DEAD_AGE, format_float(now), string.format('%016d', item.id))
    else
      finished[#finished + 1] = item.name
    end
    delete_markers(item, foreign, now)
  end
  delete_entries(finished)
  if offer and shared_state then
    claimed_next, record = claim_next(offer, shared, now)
    if #record > 1 then call('SET', KEYS[KEY_COUNT + 3], cmsgpack.pack(record), 'EX', reply_s) end
  elseif shared_state then
    write_sequences(now)
  end
  while call('ZCARD', DEAD) > dead_max do
    local id = tonumber(call('ZPOPMIN', DEAD_AGE)[1])
    call('ZREM', DEAD, id)
    delete_entries({id})
    dropped = dropped + 1
  end
end
statuses[2] = dropped
for _, item in ipairs(items) do statuses[#statuses + 1] = item.status end
if #live > 0 then
  -- A repetition of this call gets the number of claimed leases only. A claim by the nonce returns the leases.
  statuses[3] = math.max(0, #record - 1)
  call('SET', REPLY, cmsgpack.pack(statuses), 'EX', reply_s)
end
statuses[3] = claimed_next
return statuses
