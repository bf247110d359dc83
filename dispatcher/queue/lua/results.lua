-- Writing results: shared by settle and expire.
-- BAD_LIST: nothing was done, the caller answers INVALID_REQUEST to the default list instead.
-- STUCK: the default list itself cannot be pushed to: the request stays as it is, for a result that is
-- thrown away would break the one promise there is.

-- Lists and tokens that a producer names come as arguments, not as KEYS: were one of KEYS forbidden to this user,
-- Redis would refuse the whole call, and one request would hold up all others for ever.
local write_results
do
local DEFAULT = KEYS[OWN + 2]

local function push(list, results, ttl_s)
  local refusal = list == DEFAULT and STUCK or BAD_LIST
  local found = redis.pcall('TYPE', list)
  if found.err or found.ok ~= 'none' and found.ok ~= 'list' then return refusal end
  local pushed = redis.pcall('LPUSH', list, unpack(results))
  if type(pushed) == 'table' and pushed.err then return refusal end
  keep(list, found.ok == 'none', ttl_s)
  return DONE
end

-- A list in another slot: into the outbox under a number that only grows, even when a failover forgot some.
local function post(list, result, now)
  local last = tonumber(call('HGET', CONTROL, 'posted') or 0)
  local name = string.format('%.0f', math.max(last + 1, math.floor(now * 1000000)))
  call('HSET', CONTROL, 'posted', name)
  call('ZADD', OUTBOX, name, name .. '\n' .. #list .. '\n' .. list .. result)
end

-- Each of `items` has .how (0: no result, 1: push, 2: by the outbox), .list and .result; its .status is set.
function write_results(items, ttl_s, now)
  local groups, order = {}, {}
  for _, item in ipairs(items) do
    item.status = DONE
    if item.how == 2 then
      post(item.list, item.result, now)
    elseif item.how == 1 then
      if not groups[item.list] then
        groups[item.list] = {}
        order[#order + 1] = item.list
      end
      table.insert(groups[item.list], item)
    end
  end
  for _, list in ipairs(order) do
    local results = {}
    for _, item in ipairs(groups[list]) do results[#results + 1] = item.result end
    local status = push(list, results, ttl_s)
    for _, item in ipairs(groups[list]) do item.status = status end
  end
end
end
