-- Show sequences, or decide about one.
-- KEYS   own…
-- ARGV   "list", cursor, most, a status (empty: any); "show", id; "release", id; "abort", id, why; "cancel", id; "forget", id
-- Returns for a list: {cursor, {as `row` has it…}}; to show: a row, or false; released, aborted: 1, or 0 where there was nothing
--         to decide; cancelled: the entry of its head or 0, or false where there was nothing to cancel; forgotten: 1, 0 where
--         something of it runs or waits, false where nothing is known of it
-- Keeps: what waits is answered, or goes on; a head goes on to its end.
need('HSCAN', 'HGET', 'HSET', 'HDEL', 'ZADD', 'ZREM', 'ZRANGE', 'ZRANGEBYSCORE')
local verb, now = ARGV[1], clock()
all()

local function row(one, most)
  local life, line, at = one.lives[1], {}, 0
  repeat
    local names = most > 0 and page(life[NUMBER], at, most) or {}
    for _, name in ipairs(names) do
      if entry_in(name) and #line < 2 * most then
        line[#line + 1], line[#line + 2] = tonumber(string.sub(name, 18, 33)), entry_in(name)
      end
    end
    at = at + most
  until #names < most or most == 0 or #line == 2 * most
  local seats = seats_of(one)
  return {one.id, one.status, life[NEXT], one.head, seats, #one.lives, one.done, one.failed, one.born and text(one.born),
          text(one.touched), one.gap and text(one.gap), one.token ~= '' and 1 or 0, one.carried, one.cause, line}
end

if verb == 'list' then
  local found, rows = call('HSCAN', SEQUENCES, ARGV[2], 'COUNT', ARGV[3]), {}
  for at = 1, #found[2], 2 do
    local one = found[2][at] ~= '' and known(found[2][at])
    if one and (ARGV[4] == '' or ARGV[4] == one.status) then rows[#rows + 1] = row(one, 0) end
  end
  return {found[1], rows}
end

local one = known(ARGV[2])
if verb == 'show' then return one and row(one, LINE_SEEN) end
if verb == 'release' then
  if not one or one.status ~= 'held' then return 0 end
  turn_to(one, 'open')
  one.cause, one.touched = '', now
  happened('released')
  settle_down(one, now)
  keep_turns(now)
  return 1
end
if verb == 'forget' then
  if not one then return false end
  if one.head or seats_of(one) > 0 then return 0 end
  drop(one)
  settle_down(one, now)
  keep_turns(now)
  return 1
end
if not one or ENDED[one.status] then return verb == 'abort' and 0 or false end
if verb == 'abort' then
  close(one, 'aborted', 'SEQUENCE_ABORTED', ARGV[3], now)
  settle_down(one, now)
  keep_turns(now)
  return 1
end
happened('cancelled')
local next_index = one.lives[1][NEXT]
for _, life in ipairs(one.lives) do doom(life, 'CANCELLED', 'the sequence was cancelled') end
one.lives = {new_life(next_index)}
if one.head then one.head_life, one.head_last = one.lives[1][NUMBER], 1
else end_life(one, 'the sequence was cancelled', now) end
settle_down(one, now)
keep_turns(now)
return one.head or 0
