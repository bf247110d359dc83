-- Handing over: of those whose turn has come in this step, its owner leases at once what the next claim would lease first.
-- By the rules of a claim: never past the limit of all owners, and nothing before what is better and may be claimed.
-- `offer`: owner, lease_s, token base, bytes, the bytes of the largest member that is moved, limit, read_at, lost,
--        retry_after_max_s

local hand_over
do

-- The first that may be claimed, of any set.
local function first_waiting()
  local best
  for source, set in ipairs(WAITING) do
    local lane = LANES[source - 2]
    local one = not (lane and lane.closed) and head(set, 0)
    if one and (not best or earlier(one, best)) then best = one end
  end
  return best
end

-- Those that were handed over: {id, state, member}…
local function chosen(offer, shared, now)
  local limit = #came > 0 and limit_by(shared, now, offer[6], offer[7], offer[8], offer[9])
  local found = {}
  if not limit then return found end
  local free, size = limit - live_units(shared) - kept_for_probe(shared, now, offer[2]), 0
  local best = free > 0 and first_waiting()
  for _, one in ipairs(came) do one.number, one.tie = number_of(one.state[SCORE]), one.state[PREFIX] end
  table.sort(came, earlier)
  for _, one in ipairs(came) do
    local units = units_of(one.state)
    if units > free or lane_of(one.state) or (best and not earlier(one, best)) then break end
    one.member = call('HGET', MEMBERS, one.id)
    size = size + #one.member
    if #one.member > offer[5] or size > offer[4] then break end
    free = free - units
    found[#found + 1] = one
  end
  return found
end

-- Returns {facts, waiting, {as a claim tells leases}, {index, token, 1 if it is the first of a life, what it is built on}…},
--         and what the record of a claim would have
function hand_over(offer, shared, now)
  local me, lease_s, base = offer[1], offer[2], offer[3]
  local found = chosen(offer, shared, now)
  local told, turns, record, names, states, leases, counted = {}, {}, {base}, {}, {}, {}, 0
  for number, one in ipairs(found) do
    local id, state, at = one.id, one.state, #told
    names[number], record[number + 1] = name_in_order(id, state), id
    state[WHERE], state[DELIVERIES], state[MOVES] = 'L', state[DELIVERIES] + 1, state[MOVES] + 1
    state[TOKEN], state[OWNER] = base .. '-' .. id, me
    counted = counted + units_of(state)
    states[#states + 1], states[#states + 2] = id, cmsgpack.pack(state)
    leases[#leases + 1], leases[#leases + 2] = text(now + lease_s), lease_name(id, state)
    told[at + 1], told[at + 2], told[at + 3], told[at + 4] = id, state[TOKEN], one.member, state[SCORE]
    told[at + 5], told[at + 6], told[at + 7] = state[DELIVERIES], state[ATTEMPTS], state[REFUSALS]
    told[at + 8], told[at + 9], told[at + 10] = state[DEATHS], units_of(state), state[REASON] or ''
    turns[number] = {told_to_go(known(state[TURN][S_ID]), state)}
  end
  if #found > 0 then
    in_bulk('ZREM', SEQUENCED, names)
    in_bulk('HSET', ENTRIES, states)
    in_bulk('ZADD', LEASES, leases)
    hold(me, counted, counted - #found)
    for number = #found + 1, #came do came[number - #found] = came[number] end
    for number = #came, #came - #found + 1, -1 do came[number] = nil end
  end
  keep_turns(now)
  return {facts(shared, now, me, lease_s), call('ZCARD', PENDING) + call('ZCARD', RETURNED), told, turns}, record
end

end
