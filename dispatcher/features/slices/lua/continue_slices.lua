-- Lease released requests again, in the same step, for their next slice.
-- Uses: common, claim_again
-- Hooks: release
-- Columns releases: can_be_claimed_again: flag
-- The script leases the requests that can be claimed again and that the next claim would lease first. Their lease rows
-- have neither members nor progress, because the caller has both.
local slices, continued = features.slices, {}

function slices.take_place(item, state, offer)
  local lane = choose_lane(state)
  local is_continued = offer and item.can_be_claimed_again and item.delay_s <= 0 and lane
    and LANES[lane] == slices.lane
  if is_continued then continued[#continued + 1] = item end
  return is_continued
end

-- Select the continued requests that the next claim would lease first.
local function select_continued(offer, shared, now)
  local free, best, found = count_free_units(offer, shared, now), find_first_claimable(), {}
  for _, item in ipairs(continued) do
    item.tie_break = item.state[MEMBER_PREFIX]
    set_place(item, item.state[SCORE], slices.lane)
  end
  table.sort(continued, is_before)
  for number, item in ipairs(continued) do
    free = free - get_units(item.state)
    if free < 0 or best and is_before(best, item) then break end
    found[number] = item
  end
  return found
end

function slices.claim_more(offer, shared, now)
  if #continued == 0 then return nil end
  local found, lease_rows = select_continued(offer, shared, now), {}
  lease_items(found, offer, now)
  for number, item in ipairs(continued) do
    if number > #found then return_to_queue(item.id, item.state)
    else add_lease_row(lease_rows, item.id, item.state, '', '') end
  end
  return {
    build_owner_reply(shared, now, offer.owner, offer.lease_s),
    call('ZCARD', PENDING) + call('ZCARD', RETURNED) + call('ZCARD', STARTED), lease_rows, count = #found,
  }
end
