-- Submit the requests of a named stream that it does not know yet, and note them in the same step.
-- KEYS   own…, the stream's pending and consumed (streams.lua)
-- ARGV   channel, keep_s, the most ids of a stream, then of each request: score, member, id, token, deadline, digest
-- Returns the number of requests that were submitted; the error QUEUEFULL if more than queue.max_pending would wait, and
--         STREAMFULL if the stream would have more ids than it may
-- Keeps: all or none; a request of an id that the stream knows is not submitted, so a repeated call submits nothing.
local NOTED, CONSUMED = KEYS[OWN + 1], KEYS[OWN + 2]
check_kind('hash', NOTED, CONSUMED)
local new, line, notes, latest, now = {}, {}, {}, 0, clock()
for at = 4, #ARGV, 6 do
  local id = ARGV[at + 2]
  if not call('HGET', NOTED, id) and not call('HGET', CONSUMED, id) then
    new[#new + 1] = at
    line[#line + 1], line[#line + 2] = ARGV[at], ARGV[at + 1]
    notes[#notes + 1], notes[#notes + 2] = id, table.concat(ARGV, ' ', at + 3, at + 5)
    latest = math.max(latest, tonumber(ARGV[at + 4]))
  end
end
if #new == 0 then return 0 end
refuse_if_full(#new)
local ids = call('HLEN', NOTED) + call('HLEN', CONSUMED) + #new
if ids > tonumber(ARGV[3]) then error({err = 'STREAMFULL it would have ' .. ids .. ' ids, and may have ' .. ARGV[3]}) end
need('ZADD', 'SET', 'GETRANGE', 'DEL', 'HSET', 'TTL', 'EXPIRE')
call('ZADD', PENDING, unpack(line))
call('HSET', NOTED, unpack(notes))
for _, at in ipairs(new) do mark(ARGV[at + 2], ARGV[at + 3], tonumber(ARGV[at + 4]), now) end
keep_stream(NOTED, CONSUMED, math.ceil(math.max(0, latest - now) + tonumber(ARGV[2])))
redis.pcall('PUBLISH', ARGV[1], 'work')
return #new
