-- Submit the requests of a named stream that the stream does not know yet, and record them in the same step.
-- KEYS   common keys…, the stream's pending and consumed hashes (named_streams.lua)
-- ARGV   channel, lifetime of the record after the last deadline in seconds, max ids of a stream, then of each
--        request: score, member, id, token, deadline, digest
-- Returns the number of submitted requests; the error QUEUEFULL if more than queue.max_pending would wait, and
--         STREAMFULL if the stream would have more ids than it may
-- Guarantees: submits all requests or none. A request with an id that the stream knows is not submitted, so a
-- repeated call submits nothing.
local PENDING_IDS, CONSUMED_IDS = KEYS[KEY_COUNT + 1], KEYS[KEY_COUNT + 2]
check_type('hash', PENDING_IDS, CONSUMED_IDS)
local new, members, records, latest, now = {}, {}, {}, 0, current_time()
for at = 4, #ARGV, 6 do
  local id = ARGV[at + 2]
  if not call('HGET', PENDING_IDS, id) and not call('HGET', CONSUMED_IDS, id) then
    new[#new + 1] = at
    members[#members + 1], members[#members + 2] = ARGV[at], ARGV[at + 1]
    records[#records + 1], records[#records + 2] = id, table.concat(ARGV, ' ', at + 3, at + 5)
    latest = math.max(latest, tonumber(ARGV[at + 4]))
  end
end
if #new == 0 then return 0 end
reject_if_full(#new)
local ids = call('HLEN', PENDING_IDS) + call('HLEN', CONSUMED_IDS) + #new
if ids > tonumber(ARGV[3]) then error({err = 'STREAMFULL it would have ' .. ids .. ' ids, and may have ' .. ARGV[3]}) end
require_commands('ZADD', 'SET', 'GETRANGE', 'DEL', 'HSET', 'TTL', 'EXPIRE')
call('ZADD', PENDING, unpack(members))
call('HSET', PENDING_IDS, unpack(records))
for _, at in ipairs(new) do mark_active(ARGV[at + 2], ARGV[at + 3], tonumber(ARGV[at + 4]), now) end
set_stream_ttl(PENDING_IDS, CONSUMED_IDS, math.ceil(math.max(0, latest - now) + tonumber(ARGV[2])))
redis.pcall('PUBLISH', ARGV[1], 'work')
return #new
