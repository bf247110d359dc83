-- Count the requests by location, at one moment. Leases are those of all queues of the pool.
-- Uses: require_commands, common
-- Keys: queue
-- Returns now, pending (with returned and lanes), leases, delayed, dead, units of the leases, {name and
--         count of each feature…}
-- Guarantees: only reads.
local waiting = 0
for _, set in ipairs(WAITING_SETS) do waiting = waiting + call('ZCARD', set) end
local counts = {}
for _, feature in ipairs(features) do
  counts[#counts + 1], counts[#counts + 2] = feature.name, feature.count()
end
return {
  format_float(current_time()), waiting,
  call('ZCARD', LEASES), call('ZCARD', DELAYED), call('ZCARD', DEAD),
  call('ZCARD', LEASES) + tonumber(call('HGET', CONTROL, 'extra_units') or 0),
  counts,
}
