-- Lease requests in the step that has ended other leases. The rules are those of a claim: never above the limit of all
-- owners, and never before a better request that may be claimed. Used by features.
-- Uses: common, queue_order
--
-- An offer has .owner, .lease_s, .token_base, .max_bytes and .max_member_bytes, .limit, .read_at, .lost_units,
-- .retry_after_max_s and .unleased_units as a claim, and .reply_key for the record of the claim by its nonce, which is
-- kept for .reply_s.

local find_first_claimable, count_free_units, lease_items
do

-- Return the first request of all sets that a claim may take from.
function find_first_claimable()
  local best
  for source = 1, #WAITING_SETS do
    local lane = LANES[source - 2]
    local item = (not lane or is_open(lane)) and read_head(source, 0)
    if item and (not best or is_before(item, best)) then best = item end
  end
  return best
end

-- Return the number of units that the offer may lease.
function count_free_units(offer, shared, now)
  local limit = share_and_get_limit(shared, now, offer.limit, offer.read_at, offer.lost_units, offer.retry_after_max_s)
  return limit and limit - count_live_units(shared) - offer.unleased_units
    - units_reserved_for_probe(shared, now, offer.lease_s) or 0
end

-- Lease the items, which have .id and .state, and write the record by which a repeated claim finds the leases. The
-- caller removes the entries from their sets.
function lease_items(items, offer, now)
  local record, states, leases, counted = {offer.token_base}, {}, {}, 0
  local expires_at = format_float(now + offer.lease_s)
  for number, item in ipairs(items) do
    local id, state = item.id, item.state
    record[number + 1] = id
    state[LOCATION], state[DELIVERIES], state[MOVES] = 'L', state[DELIVERIES] + 1, state[MOVES] + 1
    state[TOKEN], state[OWNER] = offer.token_base .. '-' .. id, offer.owner
    counted = counted + get_units(state)
    states[#states + 1], states[#states + 2] = id, cmsgpack.pack(state)
    leases[#leases + 1], leases[#leases + 2] = expires_at, lease_name(id, state)
  end
  if #items == 0 then return end
  run_in_batches('HSET', ENTRIES, states)
  run_in_batches('ZADD', LEASES, leases)
  add_owner_units(offer.owner, counted, counted - #items)
  call('SET', offer.reply_key, cmsgpack.pack(record), 'EX', offer.reply_s)
end

end
