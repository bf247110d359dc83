-- Requests that are sent in slices. Their progress, which is what earlier slices have generated, is stored with them,
-- and they wait for their next slice in a lane of their own.
-- Feature: slices
-- Extra: PROGRESS_BYTES 16
-- Keys: STARTED zset started, PROGRESS hash progress
-- Lane: STARTED T
-- Control: progress
--
-- PROGRESS_BYTES in the state of an entry is the length of what PROGRESS has of it, for as long as there is any.
local slices = features.slices

slices.lane.goes_first = true
function slices.lane.contains(state) return state[PROGRESS_BYTES] end
function slices.count() return call('ZCARD', STARTED) end
function slices.blob_bytes(state) return state[PROGRESS_BYTES] end
function slices.read_blob(id) return call('HGET', PROGRESS, id) end

-- If the key is of another type, it has no progress, and the script goes on.
function slices.deleted(items)
  local ids = {}
  for _, item in ipairs(items) do
    local may_have_progress = slices.is_used ~= false
    if item.state then may_have_progress = item.state[PROGRESS_BYTES] end
    if may_have_progress then ids[#ids + 1] = item.id end
  end
  if #ids > 0 then redis.pcall('HDEL', PROGRESS, unpack(ids)) end
end
