-- Refresh what an owner knows to be warm, say what it has under way, and tell what holds of versions of models.
-- KEYS   WARM…
-- ARGV   the owner as its names in USED begin (empty: only look), how many to keep, how many are cold, then those, and what
--        is under way as it stands in USED
-- Returns {WARM…}, {USED…}, {LABELS, when…}, {DRAINS, when…}, {what another program's key stands in the way of…}, {WARMING…}
-- Keeps: what is not marked any more is not marked by a refreshment. A look reads only.
local me, kept, cold = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
if me ~= '' then need('TYPE', 'TIME', 'EXPIRE', 'ZADD', 'ZREM', 'ZRANGE', 'ZRANGEBYSCORE') end
local now = clock()

local function some(first, count)
  local found = {}
  for at = first, first + count - 1 do found[#found + 1] = ARGV[at] end
  return found
end
local function held(set) return call('ZRANGEBYSCORE', set, '(' .. text(now), '+inf', 'LIMIT', 0, MARKS_MOST) end
local function said(set) return call('ZRANGE', set, -DECIDED_MOST, -1, 'WITHSCORES') end

local found = {{}, {}, {}, {}, problems, {}}
if ours(1) then
  if me ~= '' then
    lapse(WARM, now, WARM_S)
    hold_for(WARM, now, WARM_S, some(4, kept), 'XX')
    remove(WARM, some(4 + kept, cold))
  end
  found[1] = held(WARM)
end
if ours(2) then
  if me ~= '' then lapse(WARMING, now, WARMING_S) end
  found[6] = held(WARMING)
end
if ours(3) then
  if me ~= '' then
    local using, mine = some(4 + kept + cold, #ARGV - 3 - kept - cold), {}
    for _, name in ipairs(call('ZRANGE', USED, 0, -1)) do
      if begins(name, me) then mine[#mine + 1] = name end
    end
    lapse(USED, now, USED_S)
    remove(USED, mine)
    hold_for(USED, now, USED_S, using)
  end
  found[2] = held(USED)
end
if ours(4) then found[3] = said(LABELS) end
if ours(5) then found[4] = said(DRAINS) end
ours(6)
ours(7)
return found
