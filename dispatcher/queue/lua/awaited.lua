-- Count the requests that wait for their model.
-- KEYS   own…
-- ARGV   none
-- Returns {model, number of requests…}, of AWAITED_MOST models at most; if there are more models, each call returns
--         others
-- Guarantees: only reads.
local model_count = call('ZCARD', ABSENT_COUNTS)
local first = model_count > AWAITED_MOST and tonumber(call('TIME')[2]) % model_count or 0
local counts = call('ZRANGE', ABSENT_COUNTS, first, first + AWAITED_MOST - 1, 'WITHSCORES')
local wrapped_count = first + AWAITED_MOST - model_count -- number of models to read from the beginning of the set
if first > 0 and wrapped_count > 0 then
  for _, value in ipairs(call('ZRANGE', ABSENT_COUNTS, 0, wrapped_count - 1, 'WITHSCORES')) do
    counts[#counts + 1] = value
  end
end
return counts
