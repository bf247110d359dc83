-- Show sequences, or decide about one.
-- KEYS   own…
-- ARGV   "list", cursor, most, a status (empty: any); "show", id; "release", id; "abort", id, why, default terms for a queue
--        that has had no sequence yet (packed as for line_up); "cancel", id, Unix time (empty: now), seconds for which earlier
--        requests may wait to be claimed; "forget", id
-- Returns for "list" {cursor, {a `row`…}}; for "show" a row, or false; for "release" and "abort" 1, or 0 if there was nothing
--         to do; for "cancel" the entry of the head or 0, or false if the sequence had ended or was not known; for "forget" 1,
--         0 if a request of the sequence runs or waits, or false if it is not known
-- Keeps: waiting requests are answered or go on, and a head goes on to its end. No request from before a cancel begins.
need('HSCAN', 'HGET', 'HSET', 'HDEL', 'ZADD', 'ZREM', 'ZRANGE', 'ZRANGEBYSCORE', 'GET', 'SET', 'TTL')
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
  local key, mark = mark_key(ARGV[2]), mark_of(ARGV[2])
  local undated = mark and mark.undated
  if one and (one.head or seats_of(one) > 0) then return 0 end
  if undated then call('SET', key, string.format('%.17g dated', mark.at), 'EX', math.max(1, call('TTL', key))) end
  if not one then return undated and 1 or false end
  drop(one)
  settle_down(one, now)
  keep_turns(now)
  return 1
end
-- Returns a sequence of which no request was claimed yet, so that it can end before it begins.
local function unbegun(id)
  local unborn = added(id)
  begin(unborn)
  unborn.lives = {new_life(0)}
  return unborn
end

if verb == 'abort' then
  if one and ENDED[one.status] then return 0 end
  if not of_all.max_idle_s then
    local terms = cmsgpack.unpack(ARGV[4])
    of_all.max_idle_s, of_all.max_age_s, of_all.max_active = terms[1], terms[2], terms[3]
    of_all.max_waiting, of_all.on_error, of_all.gap_s, of_all.refuses = terms[4], terms[5], terms[6], terms[7]
  end
  one = one or unbegun(ARGV[2])
  close(one, 'aborted', 'SEQUENCE_ABORTED', ARGV[3], now)
  settle_down(one, now)
  keep_turns(now)
  return 1
end
local key, before = mark_key(ARGV[2]), mark_of(ARGV[2])
local at, for_s = tonumber(ARGV[3]) or now, math.ceil(tonumber(ARGV[4]))
if before then at, for_s = math.max(at, before.at), math.max(for_s, call('TTL', key)) end
call('SET', key, string.format('%.17g', at), 'EX', math.max(1, for_s))
if not one and of_all.refuses == 1 then
  one = unbegun(ARGV[2])
  close(one, 'ended', 'SEQUENCE_ENDED', 'the sequence was cancelled', now)
  settle_down(one, now)
  keep_turns(now)
  return false
end
if not one or ENDED[one.status] then return false end
happened('cancelled')
local next_index = one.lives[1][NEXT]
for _, life in ipairs(one.lives) do doom(life, 'CANCELLED', 'the sequence was cancelled') end
one.lives = {new_life(next_index)}
if one.head then one.head_life, one.head_last = one.lives[1][NUMBER], 1
else end_life(one, 'the sequence was cancelled', now) end
settle_down(one, now)
keep_turns(now)
return one.head or 0
