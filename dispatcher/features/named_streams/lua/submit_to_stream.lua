-- Submit the requests of a named stream that the stream does not know yet, and record them in the same step.
-- Uses: require_commands, common, cancel_markers, max_pending, named_streams
-- Keys: queue, PENDING_IDS, CONSUMED_IDS
-- Arguments: channel, record_ttl_s: number, max_ids: number
-- List requests: score, member, id, token, deadline: number, digest
-- The record of the stream is kept for `record_ttl_s` after the last deadline.
-- Returns the number of submitted requests; the error QUEUEFULL if more than queue.max_pending would wait, and
--         EXCEEDED if the stream would have more ids than it may
-- Guarantees: submits all requests or none. A request with an id that the stream knows is not submitted, so a
-- repeated call submits nothing.
check_type('hash', PENDING_IDS, CONSUMED_IDS)
local new, members, records, latest, now = {}, {}, {}, 0, current_time()
for _, request in ipairs(requests) do
  local id = request.id
  if not call('HGET', PENDING_IDS, id) and not call('HGET', CONSUMED_IDS, id) then
    new[#new + 1] = request
    members[#members + 1], members[#members + 2] = request.score, request.member
    records[#records + 1], records[#records + 2] =
      id, request.token .. ' ' .. string.format('%.0f', request.deadline) .. ' ' .. request.digest
    latest = math.max(latest, request.deadline)
  end
end
if #new == 0 then return 0 end
reject_if_full(#new)
local ids = call('HLEN', PENDING_IDS) + call('HLEN', CONSUMED_IDS) + #new
if ids > max_ids then error({err = 'EXCEEDED the stream would have ' .. ids .. ' ids, and may have ' .. max_ids}) end
require_commands('ZADD', 'SET', 'GETRANGE', 'DEL', 'HSET', 'TTL', 'EXPIRE')
call('ZADD', PENDING, unpack(members))
call('HSET', PENDING_IDS, unpack(records))
for _, request in ipairs(new) do mark_active(request.id, request.token, request.deadline, now) end
set_stream_ttl(PENDING_IDS, CONSUMED_IDS, math.ceil(math.max(0, latest - now) + record_ttl_s))
redis.pcall('PUBLISH', channel, 'work')
return #new
