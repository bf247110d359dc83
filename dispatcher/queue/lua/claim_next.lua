-- Claim the next requests of sequences in the step that settles the previous ones. Of the requests whose turn has
-- come in this step, the owner leases those that the next claim would lease first. The rules are those of a claim:
-- never above the limit of all owners, and never before a better request that may be claimed.
-- Uses: sequences, queue_order
--
-- An offer has .owner, .lease_s, .token_base, .max_bytes and .max_member_bytes, .limit, .read_at, .lost_units,
-- .retry_after_max_s and .unleased_units as a claim, and .reply_key for the record of the claim by its nonce.

local claim_next
do

-- Return the first request of all sets that a claim may take from.
local function find_first_claimable(shared)
  local best
  for source = 1, #WAITING_SETS do
    local lane = LANES[source - 2]
    local is_read = not lane or not lane.closed and (not lane.only_if or shared[lane.only_if])
    local item = is_read and read_head(source, 0)
    if item and (not best or is_before(item, best)) then best = item end
  end
  return best
end

-- Select the first items that fit into the room and the bytes of the offer. Return them, and true if others are left.
local function select_fitting(items, free, offer)
  local found, size = {}, 0
  for number, item in ipairs(items) do
    item.member = item.member or call('HGET', MEMBERS, item.id)
    free, size = free - get_units(item.state), size + #item.member
    if free < 0 or size > offer.max_bytes or #item.member > offer.max_member_bytes then return found, true end
    found[number] = item
  end
  return found
end

-- Select the ready entries that are leased at once. Sorting them costs more than all other work here, so they are
-- only sorted if not all of them fit.
local function select_ready(offer, shared, now)
  local limit = #ready_entries > 0
    and share_and_get_limit(shared, now, offer.limit, offer.read_at, offer.lost_units, offer.retry_after_max_s)
  local free = limit and limit - count_live_units(shared) - offer.unleased_units
    - units_reserved_for_probe(shared, now, offer.lease_s) or 0
  if free < 1 then return {} end
  local best, items = find_first_claimable(shared), {}
  for _, item in ipairs(ready_entries) do
    item.tie_break, item.lane = item.state[MEMBER_PREFIX], choose_lane(item.state)
    set_place(item, item.state[SCORE], LANES[item.lane])
    if item.lane and (not best or is_before(item, best)) then best = item end
  end
  for _, item in ipairs(ready_entries) do
    if not item.lane and (not best or is_before(item, best)) then items[#items + 1] = item end
  end
  local found, has_more = select_fitting(items, free, offer)
  if not has_more then return found end
  table.sort(items, is_before)
  return (select_fitting(items, free, offer))
end

-- Return {owner reply, number of waiting requests, lease rows, a granted turn for each lease}, and the record by which
-- a repeated claim finds these leases.
function claim_next(offer, shared, now)
  local owner, lease_s, token_base = offer.owner, offer.lease_s, offer.token_base
  local found = select_ready(offer, shared, now)
  local lease_rows, turns, record, names, states, leases, counted = {}, {}, {token_base}, {}, {}, {}, 0
  local expires_at = format_float(now + lease_s)
  for number, item in ipairs(found) do
    local id, state = item.id, item.state
    names[number], record[number + 1] = ordered_name(id, state), id
    state[LOCATION], state[DELIVERIES], state[MOVES] = 'L', state[DELIVERIES] + 1, state[MOVES] + 1
    state[TOKEN], state[OWNER] = token_base .. '-' .. id, owner
    counted = counted + get_units(state)
    states[#states + 1], states[#states + 2] = id, cmsgpack.pack(state)
    leases[#leases + 1], leases[#leases + 2] = expires_at, lease_name(id, state)
    add_lease_row(lease_rows, id, state, item.member, '') -- an entry with progress is in a lane, and waits for a claim
    turns[number] = {granted_turn(load_sequence(state[SLOT][SLOT_SEQUENCE]), state)}
  end
  if #found > 0 then
    run_in_batches('ZREM', SEQUENCED, names)
    run_in_batches('HSET', ENTRIES, states)
    run_in_batches('ZADD', LEASES, leases)
    add_owner_units(owner, counted, counted - #found)
    local remaining = {}
    for _, item in ipairs(ready_entries) do
      if item.state[LOCATION] ~= 'L' then remaining[#remaining + 1] = item end
    end
    ready_entries = remaining
  end
  write_sequences(now)
  return {
    build_owner_reply(shared, now, owner, lease_s), call('ZCARD', PENDING) + call('ZCARD', RETURNED), lease_rows, turns,
  }, record
end

end
