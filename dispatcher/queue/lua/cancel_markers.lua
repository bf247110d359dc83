-- Markers by which requests are cancelled: which requests are active under an id, and which are to be cancelled. They
-- are kept by token, because two producers may use one id, and under the name of the queue, because another queue may
-- have a request with the same id.
--   <prefix>:active:<id>          the tokens under the id, each with its deadline (MessagePack)
--   <prefix>:cancel:<id>:<token>  the token; the request of that id that carries the token is to be cancelled
-- Uses: common
--
-- The markers of llm-d's producers, request-active:<id> and request-cancel:<id>, hold one token for all queues.
local MARKER_PREFIX = string.sub(RETURNED, 1, -1 - #'returned')
local function active_key(id) return MARKER_PREFIX .. 'active:' .. id end
local function cancel_key(id, token) return MARKER_PREFIX .. 'cancel:' .. id .. ':' .. token end

-- Return whether a marker holds the value. The producer chooses the size of a marker, so at most one byte more than
-- the value is read. If the key has another type, or this user may not read it, return false and the error.
local function marker_equals(key, value)
  local found = redis.pcall('GETRANGE', key, 0, #value)
  if type(found) == 'table' then return false, found end
  return found == value
end

-- Return the tokens that are active under an id, with their deadlines. A list of more than MAX_ACTIVE_BYTES counts as
-- empty, because each submission under the id would read all of it again.
local function load_active_tokens(id)
  local packed = call('GETRANGE', active_key(id), 0, MAX_ACTIVE_BYTES)
  if packed == '' or #packed > MAX_ACTIVE_BYTES then return {} end
  return cmsgpack.unpack(packed)
end

local function save_active_tokens(id, tokens, now)
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

-- Make it possible to cancel a request, until its deadline.
local function mark_active(id, token, deadline, now)
  local tokens = load_active_tokens(id)
  tokens[token] = math.max(deadline, now + 1)
  save_active_tokens(id, tokens, now)
end

-- Delete the markers of a finished request. `foreign`: also delete those of llm-d's producers, if this user may read
-- them.
local function delete_markers(item, foreign, now)
  local id, token = item.request_id, item.request_token
  if id == '' then return end
  for _, key in ipairs(foreign and {'request-active:' .. id, 'request-cancel:' .. id} or {}) do
    if marker_equals(key, token) then redis.pcall('DEL', key) end
  end
  call('DEL', cancel_key(id, token))
  local tokens = load_active_tokens(id)
  if tokens[token] then
    tokens[token] = nil
    save_active_tokens(id, tokens, now)
  end
end
