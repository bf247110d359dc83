-- Whether the queue takes more requests.

-- Each sweep of a dispatcher writes queue.max_pending. Producers that call ZADD themselves are not limited.
local function refuse_if_full(more)
  local most, there = tonumber(call('HGET', CONTROL, 'max_pending:' .. PENDING) or 0), call('ZCARD', DELAYED)
  for _, set in ipairs(WAITING) do there = there + call('ZCARD', set) end
  if most > 0 and there + more > most then
    error({err = 'QUEUEFULL ' .. there .. ' requests wait, and queue.max_pending is ' .. string.format('%.0f', most)})
  end
end
