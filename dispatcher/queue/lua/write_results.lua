-- Write results to their lists. Used by settle and settle_unleased. The status of a result is one of:
-- BAD_LIST: nothing was done; the caller writes INVALID_REQUEST to the default list instead.
-- UNWRITABLE: the default list cannot be pushed to. The request stays as it is, because a result must not be lost.
-- Uses: common, list_ttl

-- The lists and tokens that a producer names are arguments and not KEYS: if this user had no permission for one of
-- the KEYS, Redis would refuse the whole call, and one request would hold up all others for ever. The scripts that use
-- this file declare the key DEFAULT_LIST.
local write_results
do

local function push_results(list, results, ttl_s)
  local refusal = list == DEFAULT_LIST and UNWRITABLE or BAD_LIST
  local kind = redis.pcall('TYPE', list)
  if kind.err or kind.ok ~= 'none' and kind.ok ~= 'list' then return refusal end
  local pushed = redis.pcall('LPUSH', list, unpack(results))
  if type(pushed) == 'table' and pushed.err then return refusal end
  set_list_ttl(list, kind.ok == 'none', ttl_s)
  return DONE
end

-- Put a result for a list in another slot into the outbox. Its number is greater than all earlier ones, even if a
-- failover lost some of them, because it is at least the time in microseconds.
local function add_to_outbox(list, result, now)
  local last = tonumber(call('HGET', CONTROL, 'posted') or 0)
  local number = string.format('%.0f', math.max(last + 1, math.floor(now * 1000000)))
  call('HSET', CONTROL, 'posted', number)
  call('ZADD', OUTBOX, number, number .. '\n' .. #list .. '\n' .. list .. result)
end

-- Write the result of each item. An item has .delivery (0: no result, 1: push, 2: outbox), .list and .result. Sets
-- its .status.
function write_results(items, ttl_s, now)
  local groups, order = {}, {}
  for _, item in ipairs(items) do
    item.status = DONE
    if item.delivery == 2 then
      add_to_outbox(item.list, item.result, now)
    elseif item.delivery == 1 then
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
    local status = push_results(list, results, ttl_s)
    for _, item in ipairs(groups[list]) do item.status = status end
  end
end
end
