-- End the turns of requests whose result is written, in the same step.
-- Uses: sequences
-- Hooks: settle, settle_unleased
-- Columns items: turn_end: packed, conversation
-- `turn_end` is explained at `end_turn`.

function features.sequences.before_writes(items)
  local ids = {}
  for _, item in ipairs(items) do
    local slot = item.state and item.state[SLOT]
    if slot then ids[#ids + 1] = slot[SLOT_SEQUENCE] end
    if slot or item.turn_end then load_shared() end
  end
  if shared_state then features.check_used() end -- the turn of any entry may come
  if #ids > 0 then cache_sequences(ids, call('HMGET', SEQUENCES, unpack(ids))) end
end

function features.sequences.ended(item, now)
  if shared_state then end_turn(item.id, item.state, item.turn_end, item.conversation, now) end
end

-- The end of an earlier item may have made the entry of this one the next request.
function features.sequences.refresh(item)
  if not item.state[SLOT] then return end
  return_ready_entries()
  item.state = load_entry(item.id)
end

function features.sequences.flush(now)
  if shared_state then write_sequences(now) end
end
