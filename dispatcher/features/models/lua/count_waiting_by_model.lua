-- Count the requests that wait for their model.
-- Uses: require_commands, common
-- Keys: queue
-- Returns {model, number of requests…}, of MAX_COUNTED_MODELS models at most; if there are more models, each call returns
--         others
-- Guarantees: only reads.
local model_count = call('ZCARD', WAITING_FOR_MODEL_COUNTS)
local first = model_count > MAX_COUNTED_MODELS and tonumber(call('TIME')[2]) % model_count or 0
local counts = call('ZRANGE', WAITING_FOR_MODEL_COUNTS, first, first + MAX_COUNTED_MODELS - 1, 'WITHSCORES')
local wrapped_count = first + MAX_COUNTED_MODELS - model_count -- number of models to read from the beginning of the set
if first > 0 and wrapped_count > 0 then
  for _, value in ipairs(call('ZRANGE', WAITING_FOR_MODEL_COUNTS, 0, wrapped_count - 1, 'WITHSCORES')) do
    counts[#counts + 1] = value
  end
end
return counts
