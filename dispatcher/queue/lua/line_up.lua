-- Say of leased requests of sequences, once they were read, whose turn it is; give back those that are to wait.
-- KEYS   own…
-- ARGV   owner, lease_s, then packed: terms (max_idle_s, max_age_s, max_active or -1, max_waiting, on_error, gap_s, 1: what
--        comes after the end is refused, or 0), and a list of leases: {id, token, id of the sequence, index (-1: none), last,
--        reset (0/1 each), on_error, owner, time of submission (0: unknown)}…
-- Returns {facts, {1, index, token, 1 if it is the first of a life, what it is built on} for one that goes; {0} for one that
--         waits, or is not the caller's; {2, code, why} for one that never will go, and stays the caller's…}
-- Keeps: of a sequence at most one request goes, until that has ended for good; the same call again says the same of what
-- goes and waits. What waits was not delivered.
local me, lease_s = ARGV[1], tonumber(ARGV[2])
local terms, turns = cmsgpack.unpack(ARGV[3]), cmsgpack.unpack(ARGV[4])
local now, shared = clock(), control()
all()
open()
rewind(shared, now)
of_all.max_idle_s, of_all.max_age_s, of_all.max_active = terms[1], terms[2], terms[3]
of_all.max_waiting, of_all.on_error, of_all.gap_s, of_all.refuses = terms[4], terms[5], terms[6], terms[7]
local verdicts, ids, states, going, waits = {}, {}, {}, {}, {}

local function line_up(id, state, turn, on_error)
  local one = known(turn.id)
  if one and one.head == id and state[TURN] then return {1, told_to_go(one, state)} end
  local code, why = refused(one, turn, now)
  if code then return {2, code, why} end
  local index
  one, index = joined(one, turn, state[SCORE], now)
  local life = one.lives[#one.lives]
  seat(state, {1, turn.id, life[NUMBER], index, turn.last, on_error})
  leased[id] = state
  if one.status == 'open' and not one.head and #one.lives == 1 and index == life[NEXT] then -- none can lie before it
    one.gap = false
    life[NEXT], life[BEHIND] = index + 1, math.max(life[BEHIND], index + 1)
    promote(one, id, now)
    keep_one(one)
    unpark(now)
  else
    put(life, index, digits(id))
    life[SEATS] = life[SEATS] + 1
    settle_down(one, now)
  end
  leased[id] = nil
  if one.head == id then
    going[#going + 1], going[#going + 2] = id, cmsgpack.pack(state)
    return {1, told_to_go(one, state)}
  end
  leaving[id] = state
  waits[#waits + 1] = {id = id, state = state}
  return {0}
end

local names = {}
for number, told in ipairs(turns) do ids[number], names[told[3]] = told[1], true end
if #ids > 0 then
  for number, packed in ipairs(call('HMGET', ENTRIES, unpack(ids))) do
    states[ids[number]] = packed and cmsgpack.unpack(packed) or nil
  end
  local sequences = {}
  for name in pairs(names) do sequences[#sequences + 1] = name end
  know(sequences, call('HMGET', SEQUENCES, unpack(sequences)))
end
for number, told in ipairs(turns) do
  local id, state = told[1], states[told[1]]
  local ours = state and state[WHERE] == 'L' and state[TOKEN] == told[2] and not leaving[id]
  local turn = {id = told[3], index = told[4] >= 0 and told[4] or nil, last = told[5], reset = told[6] == 1, owner = told[8],
                submitted_at = told[9]}
  verdicts[number] = ours and line_up(id, state, turn, told[7]) or {0}
end
in_bulk('HSET', ENTRIES, going)
end_leases(waits, shared.probe)
for _, one in ipairs(waits) do
  one.state[DELIVERIES] = one.state[DELIVERIES] - 1
end
give_back_all(waits)
keep_turns(now)
if call('HEXISTS', CONTROL, 'probe') == 0 then shared.probe, shared.prober = nil, nil end
return {facts(shared, now, me, lease_s), verdicts}
