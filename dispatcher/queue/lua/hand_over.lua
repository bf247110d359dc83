-- Handing over: of those whose turn has come in this step, its owner leases at once what the next claim would lease first.
-- By the rules of a claim: never past the limit of all owners, and nothing before what is better and may be claimed.
-- `offer`: owner, lease_s, token base, bytes, the bytes of the largest member that is moved, limit, read_at, lost,
--        retry_after_max_s, units of the limit that no lease counts

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

-- Of these the first that fit, until their members sum to the bytes of the offer. And whether others are left.
local function fitting(some, free, offer)
  local found, size = {}, 0
  for number, one in ipairs(some) do
    one.member = one.member or call('HGET', MEMBERS, one.id)
    free, size = free - units_of(one.state), size + #one.member
    if free < 0 or size > offer[4] or #one.member > offer[5] then return found, true end
    found[number] = one
  end
  return found
end

-- Those that are handed over. To put them in order costs more than the rest, and where all of them fit they need none.
local function chosen(offer, shared, now)
  local limit = #came > 0 and limit_by(shared, now, offer[6], offer[7], offer[8], offer[9])
  local free = limit and limit - live_units(shared) - offer[10] - kept_for_probe(shared, now, offer[2]) or 0
  if free < 1 then return {} end
  local best, some = first_waiting(), {}
  for _, one in ipairs(came) do
    one.number, one.tie = number_of(one.state[SCORE]), one.state[PREFIX]
    one.apart = lane_of(one.state)
    if one.apart and (not best or earlier(one, best)) then best = one end
  end
  for _, one in ipairs(came) do
    if not one.apart and (not best or earlier(one, best)) then some[#some + 1] = one end
  end
  local found, more = fitting(some, free, offer)
  if not more then return found end
  table.sort(some, earlier)
  return (fitting(some, free, offer))
end

-- Returns {facts, waiting, {as a claim tells leases}, {index, token, 1 if it is the first of a life, what it is built on}…},
--         and what the record of a claim would have
function hand_over(offer, shared, now)
  local me, lease_s, base = offer[1], offer[2], offer[3]
  local found = chosen(offer, shared, now)
  local told, turns, record, names, states, leases, counted = {}, {}, {base}, {}, {}, {}, 0
  local ends = text(now + lease_s)
  for number, one in ipairs(found) do
    local id, state, at = one.id, one.state, #told
    names[number], record[number + 1] = name_in_order(id, state), id
    state[WHERE], state[DELIVERIES], state[MOVES] = 'L', state[DELIVERIES] + 1, state[MOVES] + 1
    state[TOKEN], state[OWNER] = base .. '-' .. id, me
    counted = counted + units_of(state)
    states[#states + 1], states[#states + 2] = id, cmsgpack.pack(state)
    leases[#leases + 1], leases[#leases + 2] = ends, lease_name(id, state)
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
    local stay = {}
    for _, one in ipairs(came) do
      if one.state[WHERE] ~= 'L' then stay[#stay + 1] = one end
    end
    came = stay
  end
  keep_turns(now)
  return {facts(shared, now, me, lease_s), call('ZCARD', PENDING) + call('ZCARD', RETURNED), told, turns}, record
end

end
