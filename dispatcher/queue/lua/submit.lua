-- Submit requests and wake the dispatchers.
-- Uses: require_commands, common, cancel_markers, max_pending
-- Keys: queue, REPLY
-- Arguments: reply_s, channel
-- List requests: score, member, id, token, deadline: number
-- List obsolete_replies: text
-- The id of a request is empty if it cannot be cancelled. `obsolete_replies` are the keys of the records of calls that
-- are not repeated any more.
-- Returns the number of requests that were not pending already; the error QUEUEFULL if more than queue.max_pending
--         would wait
-- Guarantees: submits all requests or none (a full Redis refuses the first ZADD). A repeated call adds nothing, even
-- if a dispatcher claimed the request in between.
local recorded = call('GET', REPLY)
if recorded then return tonumber(recorded) end
reject_if_full(#requests)
require_commands('ZADD', 'SET', 'GETRANGE', 'DEL')
local members, added, now = {}, 0, current_time()
for number, request in ipairs(requests) do
  members[2 * number - 1], members[2 * number] = request.score, request.member
end
for at = 1, #members, 2000 do
  added = added + call('ZADD', PENDING, unpack(members, at, math.min(at + 1999, #members)))
end
for _, request in ipairs(requests) do
  if request.id ~= '' then mark_active(request.id, request.token, request.deadline, now) end
end
call('SET', REPLY, added, 'EX', reply_s)
-- The obsolete records are deleted last, so that the ZADD is the first write, which a full Redis refuses.
for _, key in ipairs(obsolete_replies) do call('DEL', key) end
redis.pcall('PUBLISH', channel, 'work')
return added
