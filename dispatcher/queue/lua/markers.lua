-- Markers of requests: which are active under an id, and which are to be cancelled.
-- By token, for two producers may give one id; and under the queue's own name, for another queue may know it too.
--   <prefix>:active:<id>          its tokens, each with its deadline (MessagePack); until the last of them
--   <prefix>:cancel:<id>:<token>  the token: cancel the request of that id that carries it
-- What producers of llm-d write, request-active:<id> and request-cancel:<id>, holds one token for all queues.
local OURS = string.sub(RETURNED, 1, -1 - #'returned')
local function active_key(id) return OURS .. 'active:' .. id end
local function cancel_key(id, token) return OURS .. 'cancel:' .. id .. ':' .. token end

-- Returns whether a marker holds the value. The producer chooses the size of a marker, so only one byte more than the value
-- is read. If the key is of another type, or this user may not read it, returns false and the error.
local function holds(key, value)
  local found = redis.pcall('GETRANGE', key, 0, #value)
  if type(found) == 'table' then return false, found end
  return found == value
end

-- Returns the tokens that are active under an id, with their deadlines. More than ACTIVE_BYTES count as none, because each
-- submission under the id would read all of them again.
local function active(id)
  local packed = call('GETRANGE', active_key(id), 0, ACTIVE_BYTES)
  if packed == '' or #packed > ACTIVE_BYTES then return {} end
  return cmsgpack.unpack(packed)
end

local function keep_active(id, tokens, now)
  local latest = 0
  for token, deadline in pairs(tokens) do
    if deadline <= now then tokens[token] = nil else latest = math.max(latest, deadline) end
  end
  if latest > 0 then
    call('SET', active_key(id), cmsgpack.pack(tokens), 'EX', math.ceil(latest - now))
  else
    call('DEL', active_key(id))
  end
end

-- A request can be cancelled from now on, until its deadline.
local function mark(id, token, deadline, now)
  local tokens = active(id)
  tokens[token] = math.max(deadline, now + 1)
  keep_active(id, tokens, now)
end

-- The markers of a finished request. `foreign`: those of llm-d's producers can be reached from here, too, if this
-- user may read them.
local function forget_markers(item, foreign, now)
  local id, token = item.request, item.request_token
  if id == '' then return end
  for _, key in ipairs(foreign and {'request-active:' .. id, 'request-cancel:' .. id} or {}) do
    if holds(key, token) then redis.pcall('DEL', key) end
  end
  call('DEL', cancel_key(id, token))
  local tokens = active(id)
  if tokens[token] then
    tokens[token] = nil
    keep_active(id, tokens, now)
  end
end
