-- Writing results: shared by settle and expire.
local DONE, LOST, BAD_LIST, STUCK = 0, 1, 2, 3
-- BAD_LIST: nothing was done, the caller answers INVALID_REQUEST to the default list instead.
-- STUCK: the default list itself cannot be pushed to: the request stays as it is, for a result that is
-- thrown away would break the one promise there is.

local types = {}
-- Push results that belong to one list. `number`: which of KEYS it is; the default list is OWN + 2.
local function push(number, results, ttl_s)
  local key = KEYS[number]
  local refusal = number == OWN + 2 and STUCK or BAD_LIST
  local found = types[number] or call('TYPE', key).ok
  types[number] = found
  if found ~= 'none' and found ~= 'list' then return refusal end
  local pushed = redis.pcall('LPUSH', key, unpack(results))
  if type(pushed) == 'table' and pushed.err then return refusal end -- an ACL that knows no such list
  if ttl_s > 0 then call('EXPIRE', key, ttl_s) end
  return DONE
end

-- A list in another slot: into the outbox under a number that only grows, even when a failover forgot some.
local function post(list, result, now)
  local last = tonumber(call('HGET', CONTROL, 'posted') or 0)
  local number = math.max(last + 1, math.floor(now * 1000000))
  call('HSET', CONTROL, 'posted', string.format('%.0f', number))
  local name = string.format('%.0f', number)
  call('ZADD', OUTBOX, name, name .. '\n' .. #list .. '\n' .. list .. result)
end

-- Each of `items` has .list (index of KEYS, 0: no result, -1: posted to .name) and .result; .status is set.
local function write_results(items, ttl_s, now)
  local groups, order = {}, {}
  for _, item in ipairs(items) do
    if item.list == 0 then
      item.status = DONE
    elseif item.list < 0 then
      post(item.name, item.result, now)
      item.status = DONE
    else
      if not groups[item.list] then groups[item.list] = {}; order[#order + 1] = item.list end
      local group = groups[item.list]
      group[#group + 1] = item
    end
  end
  for _, number in ipairs(order) do
    local results = {}
    for _, item in ipairs(groups[number]) do results[#results + 1] = item.result end
    local status = push(number, results, ttl_s)
    for _, item in ipairs(groups[number]) do item.status = status end
  end
end

-- The token of a finished request, where it can be deleted in the same slot (index of KEYS, 0: not here).
local function forget_token(item)
  if item.active == 0 then return end
  for number = item.active, item.active + 1 do
    if redis.pcall('GET', KEYS[number]) == item.request_token then redis.pcall('DEL', KEYS[number]) end
  end
end
