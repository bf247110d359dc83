-- The limit for the number of waiting requests.
-- Uses: common

-- Raise QUEUEFULL if `new_count` more requests would exceed `queue.max_pending`, which each sweep of a dispatcher
-- stores. Producers that call ZADD themselves are not limited.
local function reject_if_full(new_count)
  local max_pending = tonumber(call('HGET', CONTROL, 'max_pending:' .. PENDING) or 0)
  if max_pending <= 0 then return end
  local waiting_count = call('ZCARD', DELAYED)
  for _, set in ipairs(WAITING_SETS) do waiting_count = waiting_count + call('ZCARD', set) end
  if waiting_count + new_count > max_pending then
    error({err = 'QUEUEFULL ' .. waiting_count .. ' requests wait, and queue.max_pending is '
      .. string.format('%.0f', max_pending)})
  end
end
