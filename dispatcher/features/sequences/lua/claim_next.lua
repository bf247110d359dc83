-- Claim the next requests of sequences in the step that settles the previous ones. Of the requests whose turn has
-- come in this step, the owner leases those that the next claim would lease first.
-- Uses: sequences, claim_again
-- Hooks: settle

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
  local free = #ready_entries > 0 and count_free_units(offer, shared, now) or 0
  if free < 1 then return {} end
  local best, items = find_first_claimable(), {}
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

-- Return {owner reply, number of waiting requests, lease rows, a granted turn for each lease} and .count, the number of
-- leases.
function features.sequences.claim_more(offer, shared, now)
  if not shared_state then return nil end
  local found = select_ready(offer, shared, now)
  local lease_rows, turns, names = {}, {}, {}
  for number, item in ipairs(found) do names[number] = ordered_name(item.id, item.state) end
  lease_items(found, offer, now)
  for number, item in ipairs(found) do
    local state = item.state
    add_lease_row(lease_rows, item.id, state, item.member, '') -- an entry with a blob is in a lane and waits for a claim
    turns[number] = {granted_turn(load_sequence(state[SLOT][SLOT_SEQUENCE]), state)}
  end
  if #found > 0 then
    run_in_batches('ZREM', SEQUENCED, names)
    local remaining = {}
    for _, item in ipairs(ready_entries) do
      if item.state[LOCATION] ~= 'L' then remaining[#remaining + 1] = item end
    end
    ready_entries = remaining
  end
  write_sequences(now)
  return {
    build_owner_reply(shared, now, offer.owner, offer.lease_s), call('ZCARD', PENDING) + call('ZCARD', RETURNED),
    lease_rows, turns, count = #found,
  }
end
