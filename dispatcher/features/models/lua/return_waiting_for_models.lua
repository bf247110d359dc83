-- Return requests that wait for these models to the queue, lowest score first.
-- Uses: owner_commands, common, waiting_for_model
-- Keys: queue
-- Arguments: max_count: number
-- List names: text
-- Returns {number of returned requests, number of requests that still wait for one of these models}
-- Guarantees: each request goes to its old place in the queue. Requests that wait for other models are not read.
local best_by_model, returned, remaining = {}, 0, 0
local models = features.models
features.check_types(models)
features.check_used()

-- Return score and entry of the first request that waits for the model, or nil.
local function find_best(model)
  local prefix = models.name_prefix(model)
  local low, high = '[' .. prefix .. ':', '(' .. prefix .. ';'
  local name = call('ZRANGE', WAITING_FOR_MODEL_ORDER, low, high, 'BYLEX', 'LIMIT', 0, 1)[1]
  return name and string.sub(name, #prefix + 2)
end

for _, model in ipairs(names) do best_by_model[model] = max_count > 0 and find_best(model) or nil end
if next(best_by_model) then begin_writes() end
while returned < max_count do
  local best
  for model, name in pairs(best_by_model) do
    if not best or name < best_by_model[best] then best = model end
  end
  if not best then break end
  local id = tonumber(string.sub(best_by_model[best], -16))
  models.return_entry(id, load_entry(id))
  returned = returned + 1
  best_by_model[best] = find_best(best)
end
for _, model in ipairs(names) do
  remaining = remaining + tonumber(call('ZSCORE', WAITING_FOR_MODEL_COUNTS, model) or 0)
end
return {returned, remaining}
