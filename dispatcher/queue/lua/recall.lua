-- Bring back requests that wait for these models, the best first.
-- KEYS   own…
-- ARGV   most, then models…
-- Returns {how many came back, how many wait still for one of these}
-- Keeps: each goes to its old place in the order. Those that wait for other models are not looked at.
local most, heads, names, moved, left = tonumber(ARGV[1]), {}, {}, 0, 0
models.checked()

-- Score and entry of the best that waits for it; nil: none does.
local function head(model)
  local part = models.part_of(model)
  local place = call('ZRANGE', ABSENT_ORDER, '[' .. part .. ':', '(' .. part .. ';', 'BYLEX', 'LIMIT', 0, 1)[1]
  return place and string.sub(place, #part + 2)
end

for at = 2, #ARGV do
  names[#names + 1] = ARGV[at]
  heads[ARGV[at]] = most > 0 and head(ARGV[at]) or nil
end
if next(heads) then open() end
while moved < most do
  local best
  for model, place in pairs(heads) do
    if not best or place < heads[best] then best = model end
  end
  if not best then break end
  local id = tonumber(string.sub(heads[best], -16))
  models.call_back(id, load(id))
  moved = moved + 1
  heads[best] = head(best)
end
for _, model in ipairs(names) do left = left + tonumber(call('ZSCORE', ABSENT_COUNTS, model) or 0) end
return {moved, left}
