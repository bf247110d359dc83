-- Say of leased requests of sequences, once they were read, whose turn it is; give back those that are to wait.
-- KEYS   own…
-- ARGV   owner, lease_s, terms (max_idle_s, max_age_s, max_active or -1, max_waiting, on_error, gap_s, 1: what comes after
--        the end is refused, or 0), then per lease: id, token, id of the sequence, index (-1: none), last, reset (0/1 each),
--        on_error
-- Returns {facts, {1, index, token, 1 if it is the first of a life, what it is built on} for one that goes; {0} for one that
--         waits, or is not the caller's; {2, code, why} for one that never will go, and stays the caller's…}
-- Keeps: of a sequence at most one request goes, until that has ended for good; the same call again says the same of what
-- goes and waits. What waits was not delivered.
local me, lease_s = ARGV[1], tonumber(ARGV[2])
local now, shared = clock(), control()
all()
open()
rewind(shared, now)
of_all.max_idle_s, of_all.max_age_s, of_all.max_active = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
of_all.max_waiting, of_all.on_error, of_all.gap_s = tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
of_all.refuses = tonumber(ARGV[9])
local verdicts = {}

local function goes(one, state)
  local carried = one.carried > 0 and call('HGET', CARRIED, one.id) or ''
  return {1, state[TURN][S_INDEX], one.token, one.done == 0 and 1 or 0, carried}
end

local function line_up(id, state, turn, on_error)
  local one = known(turn.id)
  if one and one.head == id and state[TURN] then return goes(one, state) end
  local code, why = refused(one, turn, now)
  if code then return {2, code, why} end
  local index
  one, index = joined(one, turn, state[SCORE], now)
  local life = one.lives[#one.lives]
  seat(state, {1, turn.id, life[NUMBER], index, turn.last, on_error})
  put(life, index, digits(id))
  life[SEATS] = life[SEATS] + 1
  leased[id] = state
  settle_down(one, now)
  leased[id] = nil
  if one.head == id then
    save(id, state)
    return goes(one, state)
  end
  end_leases({{id = id, state = state}}, shared.probe)
  state[DELIVERIES] = state[DELIVERIES] - 1
  give_back(id, state)
  return {0}
end

for at = 10, #ARGV, 7 do
  local id, index = tonumber(ARGV[at]), tonumber(ARGV[at + 3])
  local state = held(id, ARGV[at + 1])
  local turn = {id = ARGV[at + 2], index = index >= 0 and index or nil, last = tonumber(ARGV[at + 4]),
                reset = ARGV[at + 5] == '1'}
  verdicts[#verdicts + 1] = state and line_up(id, state, turn, ARGV[at + 6]) or {0}
end
keep_all()
if call('HEXISTS', CONTROL, 'probe') == 0 then shared.probe, shared.prober = nil, nil end
return {facts(shared, now, me, lease_s), verdicts}
