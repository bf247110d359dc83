-- Sequences (core/sequences/rules.py, which has the rules and their words): requests of one id run in order, one at a time.
--
-- SEQUENCES   by the id of a sequence what is known of it (packed, as `read` has it); under '' what all share
-- TURNS       the lines of all lives, in the order of bytes: '<life>:<index>:<entry>', 16 digits each, of a seat;
--             '<life>:<index>:-<last><failed><then><cause>' of an index whose request ended before its turn
-- SEQUENCED   the lane in which seats wait, by score. PARKED: ids of those that may not begin yet, by the best score
-- OVER        '<life>:<code>:<why>' by life: its seats are to be answered. LOOKS: ids by when the sweep looks at them
--
-- <prefix>:sequences:cancelled:<id>  the Unix time at which the sequence was cancelled, followed by ' dated' if the cancel does
--             not cover requests without a time of submission; it expires when no earlier request can wait to be claimed
--
-- The seat of an entry (TURN in its state): IN_LINE, then these:
local S_ID, S_LIFE, S_INDEX, S_LAST, S_THEN = 2, 3, 4, 5, 6
local ALIVE, ENDED = {open = true, held = true}, {aborted = true, ended = true}
local SHARED = {'lives', 'active', 'max_idle_s', 'max_age_s', 'max_active', 'max_waiting', 'on_error', 'gap_s', 'refuses',
                'held', 'aborted', 'ever_held', 'ever_released', 'ever_aborted', 'ever_cancelled', 'ever_idle', 'ever_aged',
                'ever_gaps', 'last_held', 'last_aborted'}
local NUMBER, NEXT, BEHIND, SEATS, PASSED = 1, 2, 3, 4, 5 -- of a life
local leased, of_all, known_ones = {}, nil, {}
local moved = 0 -- entries that became claimable

-- What a script leaves is written at its end (`keep_turns`), for many requests by few commands: sequences that have
-- changed, names in the lines, entries whose turn has come (they lie in the lane), and those that are to wait (they are
-- leased). Whoever reads the line of a life has its names written first.
local changed, came, leaving = {}, {}, {}
local lined, unlined, written_of = {}, {}, {} -- names to add and to take, and of which lives
local nobody_parked = false -- it was looked up, and none was parked since
local function in_bulk(command, key, args)
  for at = 1, #args, 1000 do call(command, key, unpack(args, at, math.min(at + 999, #args))) end
end
local function write_lines()
  in_bulk('ZADD', TURNS, lined)
  in_bulk('ZREM', TURNS, unlined)
  lined, unlined, written_of = {}, {}, {}
end

local function digits(number) return string.format('%016d', number) end
local function place(number, index) return string.format('%016d:%016.0f:', number, index) end

-- Terms are those that were told last; before the first time nothing is known of any sequence. Who may come to write
-- asks for it before any write.
local function all()
  if of_all then return of_all end
  check_types(OFTEN + 1, OF_MODELS)
  of_all = {lives = 0, active = 0, held = 0, aborted = 0, ever_held = 0, ever_released = 0, ever_aborted = 0,
            ever_cancelled = 0, ever_idle = 0, ever_aged = 0, ever_gaps = 0, last_held = '', last_aborted = ''}
  local packed = call('HGET', SEQUENCES, '')
  local values = packed and cmsgpack.unpack(packed) or {}
  for at, name in ipairs(SHARED) do
    if values[at] ~= nil then of_all[name] = values[at] end
  end
  of_all.told = packed
  return of_all
end

local function keep_all()
  if not of_all.max_idle_s then return end -- nobody has told any terms, so there is nothing to keep
  local values = {}
  for at, name in ipairs(SHARED) do values[at] = of_all[name] end
  local packed = cmsgpack.pack(values)
  if packed ~= of_all.told then call('HSET', SEQUENCES, '', packed) end
  of_all.told = packed
end

-- What people are told of (core/sequences/decisions.py: SequenceNews).
local function happened(what) all()['ever_' .. what] = of_all['ever_' .. what] + 1 end

-- Written out, for a table that grows field by field takes three times as long.
local function read(id, packed)
  local of = cmsgpack.unpack(packed)
  return {id = id, status = of[1], touched = of[2], head = of[3], head_life = of[4], head_last = of[5], head_then = of[6],
          born = of[7], gap = of[8], token = of[9], done = of[10], failed = of[11], cause = of[12], carried = of[13],
          lives = of[14], look = of[15], owner = of[16]}
end
local function written(one)
  return cmsgpack.pack({one.status, one.touched, one.head, one.head_life, one.head_last, one.head_then, one.born, one.gap,
                        one.token, one.done, one.failed, one.cause, one.carried, one.lives, one.look, one.owner})
end

local function known(id)
  local one = known_ones[id]
  if one ~= nil then return one end
  local packed = call('HGET', SEQUENCES, id)
  one = packed and read(id, packed) or nil
  known_ones[id] = one or false
  return one
end

-- What was read of these by one command, which operators have no right to.
local function know(ids, found)
  for number, packed in ipairs(found) do known_ones[ids[number]] = packed and read(ids[number], packed) end
end

-- Marks of cancelled sequences by id; false for a sequence that was not cancelled.
local marks = {}
local function mark_key(id) return string.sub(RETURNED, 1, -1 - #'returned') .. 'sequences:cancelled:' .. id end
local function mark_of(id)
  if marks[id] == nil then
    local at, dated = string.match(call('GET', mark_key(id)) or '', '^(%S+)(.*)$')
    at = tonumber(at or '')
    marks[id] = at and {at = at, undated = dated ~= ' dated'} or false
  end
  return marks[id]
end

-- Returns the reason why a cancel of its sequence ends a request with this time of submission (0: unknown), or nil.
local function why_cancelled(id, submitted_at)
  local mark = mark_of(id)
  if not mark then return nil end
  if submitted_at > 0 then return submitted_at <= mark.at and 'the sequence was cancelled' or nil end
  return mark.undated and 'the sequence was cancelled, and no data.created says that the request came later' or nil
end

local function new_number()
  all().lives = all().lives + 1
  return of_all.lives
end
local function new_life(next_index) return {new_number(), next_index, next_index, 0, 0} end

local function seats_of(one)
  local seats, passed = 0, 0
  for _, life in ipairs(one.lives) do seats, passed = seats + life[SEATS], passed + life[PASSED] end
  return seats, passed
end

local function has_room() return all().max_active < 0 or of_all.active < of_all.max_active end

local function turn_to(one, status)
  all().active = of_all.active + (ALIVE[status] and 1 or 0) - (ALIVE[one.status] and 1 or 0)
  for _, counted in ipairs({'held', 'aborted'}) do
    of_all[counted] = of_all[counted] + (status == counted and 1 or 0) - (one.status == counted and 1 or 0)
  end
  if one.status == 'parked' and status ~= 'parked' then call('ZREM', PARKED, one.id) end
  one.status = status
end

-- What lies in the line of a life, in order: a page.
local function page(number, at, most)
  if written_of[number] then write_lines() end
  local low = digits(number)
  return call('ZRANGE', TURNS, '[' .. low .. ':', '(' .. low .. ';', 'BYLEX', 'LIMIT', at, most)
end
local function lies_at(number, index)
  if written_of[number] then write_lines() end
  local low = place(number, index)
  return call('ZRANGE', TURNS, '[' .. low, '(' .. string.sub(low, 1, -2) .. ';', 'BYLEX', 'LIMIT', 0, 1)[1]
end
local function seat_name(number, index, id) return place(number, index) .. digits(id) end
local function entry_in(name) return tonumber(string.sub(name, 35)) end -- nil where it has passed

local function clear(number)
  repeat
    local names = page(number, 0, 500)
    if #names > 0 then call('ZREM', TURNS, unpack(names)) end
  until #names < 500
end

local function put(life, index, rest)
  written_of[life[NUMBER]] = true
  lined[#lined + 1], lined[#lined + 2] = '0', place(life[NUMBER], index) .. rest
  life[BEHIND] = math.max(life[BEHIND], index + 1)
end
local function put_passed(life, index, last, failed, on_error, cause)
  local what = (last == 1 and '1' or '0') .. (failed == 1 and '1' or '0') .. (failed == 1 and on_error or 'continue')
  put(life, index, '-' .. what .. ':' .. cause)
  life[PASSED] = life[PASSED] + 1
end

local function carry(one, bytes)
  if bytes == '' then
    if one.carried > 0 then call('HDEL', CARRIED, one.id) end
  else
    call('HSET', CARRIED, one.id, bytes)
  end
  one.carried = #bytes
end

local function begin(one)
  one.born, one.token, one.cause, one.done, one.failed = false, '', '', 0, 0
  carry(one, '')
end

local function next_life(one)
  table.remove(one.lives, 1)
  begin(one)
  if one.status == 'held' then turn_to(one, 'open') end
end

local function drop(one)
  for _, life in ipairs(one.lives) do
    if life[PASSED] > 0 then clear(life[NUMBER]) end
  end
  carry(one, '')
  turn_to(one, 'ended')
  call('HDEL', SEQUENCES, one.id)
  call('ZREM', LOOKS, one.id)
  known_ones[one.id], one.gone = false, true
end

local function doom(life, code, why)
  if life[SEATS] > 0 then
    call('ZADD', OVER, life[NUMBER], digits(life[NUMBER]) .. ':' .. code .. ':' .. why)
  elseif life[PASSED] > 0 then
    clear(life[NUMBER])
  end
  life[SEATS], life[PASSED] = 0, 0
end

local function close(one, status, code, why, now)
  if status == 'aborted' then
    happened('aborted')
    of_all.last_aborted = one.id
  end
  doom(one.lives[1], code, why)
  if #one.lives > 1 then
    next_life(one)
    return
  end
  one.lives = {new_life(one.lives[1][NEXT])}
  turn_to(one, status)
  one.token, one.cause, one.touched = '', why, now
  carry(one, '')
end

local function end_life(one, why, now)
  local life = one.lives[1]
  if all().refuses == 1 then
    close(one, 'ended', 'SEQUENCE_ENDED', why, now)
  elseif life[SEATS] > 0 then
    begin(one)
    life[NEXT] = tonumber(string.sub(page(life[NUMBER], 0, 1)[1], 18, 33))
  elseif #one.lives > 1 then
    if life[PASSED] > 0 then clear(life[NUMBER]) end
    next_life(one)
  else
    drop(one)
  end
end

local function end_if_old(one, now)
  if not one.gone and one.status == 'open' and one.born and now >= one.born + all().max_age_s then
    happened('aged')
    end_life(one, 'it had run for max_age_s', now)
  end
end

local function follow(one, last, on_error, cause, now)
  if last then
    end_life(one, 'its last request has ended', now)
  elseif on_error == 'abort' then
    close(one, 'aborted', 'SEQUENCE_ABORTED', cause, now)
  elseif on_error == 'hold' then
    turn_to(one, 'held')
    one.cause = cause
    happened('held')
    of_all.last_held = one.id
  end
end

-- A seat becomes the head. False: its entry is gone, whoever took it.
local function promote(one, id, now)
  local state = leased[id] or leaving[id] or load(id)
  if not state or not state[TURN] then return false end
  if not leased[id] then
    if not leaving[id] then came[#came + 1] = {id = id, state = state, number = 0, tie = '', apart = false, member = false} end
    moved = moved + 1
  end
  state[TURN][IN_LINE] = 0
  one.head, one.head_life = id, state[TURN][S_LIFE]
  one.head_last, one.head_then = state[TURN][S_LAST], state[TURN][S_THEN]
  one.born, one.touched = one.born or now, now
  return true
end

-- Make the one that goes next the head, as far as it may go now.
local function advance(one, now)
  local gap = one.gap
  one.gap = false
  while not one.gone and not one.head and ALIVE[one.status] do
    local held, life = one.status == 'held', one.lives[1]
    local name = life[SEATS] + life[PASSED] > 0 and page(life[NUMBER], 0, 1)[1]
    if not name then
      life[SEATS], life[PASSED] = 0, 0
      if held or #one.lives == 1 then return end
      next_life(one)
    else
      local index, id = tonumber(string.sub(name, 18, 33)), entry_in(name)
      if index > life[NEXT] and held then return end
      if index > life[NEXT] and #one.lives == 1 then
        gap = gap or now
        if now < gap + all().gap_s then
          one.gap = gap
          return
        end
        happened('gaps')
      end
      local last, failed, on_error, cause
      if not id then last, failed, on_error, cause = string.match(name, '^%d+:%d+:%-(%d)(%d)(%a+):(.*)$') end
      if held and (id or last == '1') then return end
      unlined[#unlined + 1], written_of[life[NUMBER]] = name, true
      life[NEXT], life[BEHIND], gap = index + 1, math.max(life[BEHIND], index + 1), false
      if id then
        life[SEATS] = life[SEATS] - 1
        if promote(one, id, now) then return end
      else
        life[PASSED] = life[PASSED] - 1
        one.done, one.failed = one.done + 1, one.failed + tonumber(failed)
        if not held then follow(one, last == '1', on_error, cause, now) end
      end
    end
  end
end

local function keep_one(one) changed[#changed + 1] = one end

local function unpark(now)
  for _ = 1, UNPARK_MOST do
    local id = has_room() and not nobody_parked and call('ZRANGE', PARKED, 0, 0)[1]
    if not id then
      nobody_parked = nobody_parked or id == nil
      return
    end
    local one = known(id)
    if one and one.status == 'parked' then
      turn_to(one, 'open')
      advance(one, now)
      keep_one(one)
    else
      call('ZREM', PARKED, id)
    end
  end
end

local function settle_down(one, now)
  advance(one, now)
  keep_one(one)
  unpark(now)
end

-- Back to their places in the order.
local function give_back_all(items)
  local states, sets = {}, {}
  for _, one in ipairs(items) do
    local state = one.state
    local at = 2 + (lane_of(state) or 0)
    local set = sets[at] or {}
    state[WHERE], state[MOVES] = WAITING_LETTERS[at], state[MOVES] + 1
    sets[at], set[#set + 1], set[#set + 2] = set, state[SCORE], name_in_order(one.id, state)
    states[#states + 1], states[#states + 2] = one.id, cmsgpack.pack(state)
  end
  for at, set in pairs(sets) do in_bulk('ZADD', WAITING[at], set) end
  in_bulk('HSET', ENTRIES, states)
end

-- Those whose turn has come wait for a claim.
local function bring()
  local names = {}
  for number, one in ipairs(came) do names[number] = name_in_order(one.id, one.state) end
  in_bulk('ZREM', SEQUENCED, names)
  give_back_all(came)
  came = {}
end

local keep_turns
do

-- When time may change something of it.
local function wants_a_look_at(one, now)
  if one.head then return now + LOOK_S end
  local terms = all()
  local due = now + math.max(terms.max_idle_s, LOOK_S)
  if seats_of(one) == 0 then due = one.touched + terms.max_idle_s end
  if one.gap then due = math.min(due, one.gap + terms.gap_s) end
  if one.status == 'open' and one.born then due = math.min(due, one.born + terms.max_age_s) end
  return due
end

-- What a script that ends has to write.
function keep_turns(now)
  write_lines()
  bring()
  local kept, looks = {}, {}
  for _, one in ipairs(changed) do
    if not one.gone and not one.kept then
      one.kept = true
      local due = wants_a_look_at(one, now)
      -- A look that comes too soon finds nothing, and sees to the next: most have one ahead, and need no other.
      if not one.look or one.look <= now or one.look > due then
        one.look = due
        looks[#looks + 1], looks[#looks + 2] = text(due), one.id
      end
      kept[#kept + 1], kept[#kept + 2] = one.id, written(one)
    end
  end
  in_bulk('HSET', SEQUENCES, kept)
  in_bulk('ZADD', LOOKS, looks)
  if of_all then keep_all() end
end
end

local function is_full(most) return 'SEQUENCE_FULL', string.format('%.0f requests of its sequence wait already', most) end

-- Returns the code and the message by which a turn is refused, or nil. A turn has .id, .index (nil: behind all), .last, .reset,
-- .owner and .submitted_at.
local function refused(one, turn, now)
  local terms = all()
  local most = terms.max_waiting
  -- This check comes first, so that the answer to another producer shows nothing but that the sequence is not its own. A
  -- sequence that a dispatcher of an older version wrote last has no owner; its next request fixes the owner.
  if one and one.owner and one.owner ~= turn.owner then return 'SEQUENCE_DENIED', 'its sequence belongs to another producer' end
  local cancelled = why_cancelled(turn.id, turn.submitted_at)
  if cancelled then return 'CANCELLED', cancelled end
  if one and ENDED[one.status] and not turn.reset then
    one.touched = now
    keep_one(one)
    return one.status == 'aborted' and 'SEQUENCE_ABORTED' or 'SEQUENCE_ENDED', one.cause
  end
  if not one or ENDED[one.status] then
    local goes = has_room() and (turn.reset or (turn.index or 0) == 0)
    if goes or most > 0 then return nil end
    return is_full(most)
  end
  local life = one.lives[#one.lives]
  local index = turn.index or life[BEHIND]
  if not turn.reset then
    if index < life[NEXT] then
      return 'SEQUENCE_INDEX', string.format('index %.0f: %.0f is next', index, life[NEXT])
    elseif index < life[BEHIND] and lies_at(life[NUMBER], index) then
      return 'SEQUENCE_INDEX', string.format('index %.0f was there before', index)
    end
  end
  local goes = one.status == 'open' and not one.head and #one.lives == 1
  if turn.reset then goes = goes and life[SEATS] + life[PASSED] == 0 else goes = goes and index == life[NEXT] end
  if goes then return nil end
  local seats, passed = seats_of(one)
  if seats + passed >= most or (turn.reset and #one.lives >= LIVES_MOST) then return is_full(most) end
end

-- Of one whose turn it is: its index, the token, 1 if it is the first of a life, what it is built on.
local function told_to_go(one, state)
  local carried = one.carried > 0 and call('HGET', CARRIED, one.id) or ''
  return state[TURN][S_INDEX], one.token, one.done == 0 and 1 or 0, carried
end

local function added(id)
  local one = {id = id, status = 'ended', head = false, head_life = 0, head_last = 0, head_then = '', gap = false, carried = 0}
  known_ones[id] = one
  return one
end

-- The sequence with a life that takes the turn, and its index there.
local function joined(one, turn, score, now)
  local fresh = not one or ENDED[one.status]
  one = one or added(turn.id)
  one.owner = one.owner or turn.owner
  if fresh then
    begin(one)
    one.lives = {}
    turn_to(one, has_room() and 'open' or 'parked')
  end
  if fresh or turn.reset then one.lives[#one.lives + 1] = new_life(turn.reset and turn.index or 0) end
  one.touched = now
  -- A score is text, and its order Redis's: the set keeps the lower one.
  if one.status == 'parked' then
    call('ZADD', PARKED, 'LT', score, one.id)
    nobody_parked = false
  end
  return one, turn.index or one.lives[#one.lives][BEHIND]
end

-- A request that was never lined up has ended: where others would wait for it, its index has passed.
local function pass_by(told, now)
  if not all().gap_s then return end -- no sequence was ever told of here
  local turn = {id = told[1], index = told[2] >= 0 and told[2] or nil, reset = told[4] == 1, owner = told[10],
                submitted_at = told[11]}
  local failed, one = told[6], known(told[1])
  local on_error = told[5] ~= '' and told[5] or of_all.on_error
  if not turn.index and (failed == 0 or on_error == 'continue') then return end
  if (not one or ENDED[one.status]) and not has_room() then return end
  if refused(one, turn, now) then return end
  local index
  one, index = joined(one, turn, '+inf', now)
  put_passed(one.lives[#one.lives], index, told[3], failed, on_error, told[7])
  settle_down(one, now)
end

local function told_of(packed) return packed ~= '' and cmsgpack.unpack(packed) or nil end

-- An entry has ended for good. `told`: nil, or id, index (-1: none), last, reset, on_error ('': as the terms say), failed,
-- cause, token (nil: as before), 1 where `carried` counts, owner, time of submission (0: unknown)
local function end_turn(id, state, told, carried, now)
  local turn = state and state[TURN]
  if not turn then
    if told then pass_by(told, now) end
    return
  end
  seat(state, false)
  local failed, cause = told and told[6] or 0, told and told[7] or ''
  local one, number, index = known(turn[S_ID]), turn[S_LIFE], turn[S_INDEX]
  if one and one.head == id then
    one.head, one.touched = false, now
    if one.status == 'open' and one.head_life == one.lives[1][NUMBER] then
      if told and told[8] then one.token = told[8] end
      if told and told[9] == 1 then carry(one, carried) end
      one.done, one.failed = one.done + 1, one.failed + failed
      follow(one, one.head_last == 1, failed == 1 and one.head_then or 'continue', cause, now)
      end_if_old(one, now)
    end
    settle_down(one, now)
    return
  end
  if turn[IN_LINE] ~= 1 then return end -- it was a head that the sweep gave up
  write_lines()
  call('ZREM', TURNS, seat_name(number, index, id))
  for _, life in ipairs(one and one.lives or {}) do
    if life[NUMBER] == number then
      life[SEATS] = life[SEATS] - 1
      put_passed(life, index, turn[S_LAST], failed, turn[S_THEN], cause)
      one.touched = now
      settle_down(one, now)
      return
    end
  end
  repeat -- its life is over: the last to be answered takes what has passed with it
    local names, left = page(number, 0, 100), false
    for _, name in ipairs(names) do
      left = left or entry_in(name)
      if not left then call('ZREM', TURNS, name) end
    end
  until left or #names < 100
  if #page(number, 0, 1) == 0 then
    for _, name in ipairs(call('ZRANGEBYSCORE', OVER, number, number)) do call('ZREM', OVER, name) end
  end
end
