-- Write the results of requests past their deadline, and remove them.
-- KEYS   own…, reply record, default list
-- ARGV   reply_s, ttl_s, foreign (as in settle), then per request: place, member, how, list, result, request id, request
--        token, what it leaves to its sequence, what the next of that is built on (as in settle)
-- Returns {status per request (0 done, 1 lies elsewhere by now, 2 bad list, 3 stuck)…}
-- Keeps: a result is written exactly when its request goes, if it still lies where it was found.
local REPLY = KEYS[OWN + 1]
local recorded = call('GET', REPLY)
if recorded then return cmsgpack.unpack(recorded) end
local ttl_s, foreign, now = tonumber(ARGV[2]), ARGV[3] == '1', clock()
local SETS = {D = DELAYED_ORDER}
for number, letter in ipairs(WAITING_LETTERS) do SETS[letter] = WAITING[number] end
local items, live, seen = {}, {}, {}
for at = 4, #ARGV, 9 do
  local item = {place = ARGV[at], member = ARGV[at + 1], how = tonumber(ARGV[at + 2]),
                list = ARGV[at + 3], result = ARGV[at + 4], request = ARGV[at + 5],
                request_token = ARGV[at + 6], told = told_of(ARGV[at + 7]), carried = ARGV[at + 8], status = LOST}
  items[#items + 1] = item
  local there
  if item.place == 'P' then
    there = call('ZSCORE', PENDING, item.member)
  else
    local letter, id, moves = string.match(item.place, '^(%a):(%d+):(%d+)$')
    local state = load(tonumber(id))
    there = state and state[WHERE] == letter and state[MOVES] == tonumber(moves)
    item.id, item.state = tonumber(id), state
  end
  local name = item.place == 'P' and item.member or item.place
  if there and not seen[name] then
    seen[name] = true
    live[#live + 1] = item
    if item.told or item.state and item.state[TURN] then all() end
    if item.state and item.state[AWAITS] then models.checked() end
  end
end

if #live > 0 then
  open()
  write_results(live, ttl_s, now)
  for _, item in ipairs(live) do
    if item.status == DONE then
      if item.state and item.state[TURN] then -- one before it may have made it the head
        bring()
        item.state = load(item.id)
      end
      if item.state then
        call('ZREM', SETS[item.state[WHERE]], name_in_order(item.id, item.state))
        if item.state[WHERE] == 'D' then call('ZREM', DELAYED, string.format('%016d', item.id)) end
        if item.state[AWAITS] then models.forget(item.id, item.state) end
        forget({item.id})
      else
        call('ZREM', PENDING, item.member)
      end
      end_turn(item.id, item.state, item.told, item.carried, now)
      forget_markers(item, foreign, now)
    end
  end
  if of_all then keep_turns(now) end
end
local statuses = {}
for number, item in ipairs(items) do statuses[number] = item.status end
if #live > 0 then call('SET', REPLY, cmsgpack.pack(statuses), 'EX', ARGV[1]) end
return statuses
