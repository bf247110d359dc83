-- Markers of requests: which are active under an id, and which are to be cancelled.
-- By token, for two producers may give one id; and under the queue's own name, for another queue may know it too.
--   <prefix>:active:<id>          its tokens, each with its deadline (MessagePack); until the last of them
--   <prefix>:cancel:<id>:<token>  the token: cancel the request of that id that carries it
-- What producers of llm-d write, request-active:<id> and request-cancel:<id>, holds one token for all queues.
local OURS = string.sub(RETURNED, 1, -1 - #'returned')
local function active_key(id) return OURS .. 'active:' .. id end
local function cancel_key(id, token) return OURS .. 'cancel:' .. id .. ':' .. token end

local function unpacked(packed) return packed and cmsgpack.unpack(packed) or {} end
local function active(id) return unpacked(call('GET', active_key(id))) end

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
  local theirs = {'request-active:' .. id, 'request-cancel:' .. id}
  local found = foreign and redis.pcall('MGET', active_key(id), theirs[1], theirs[2]) or {err = ''}
  if found.err then found = {call('GET', active_key(id))} end
  for number = 1, 2 do
    if found[number + 1] == token then redis.pcall('DEL', theirs[number]) end
  end
  call('DEL', cancel_key(id, token))
  local tokens = unpacked(found[1])
  if tokens[token] then
    tokens[token] = nil
    keep_active(id, tokens, now)
  end
end
