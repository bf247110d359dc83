-- Check which requests are to be cancelled.
-- Uses: require_commands, common, cancel_markers
-- Keys: queue
-- Arguments: foreign
-- List requests: id, token, may_have_marker: flag
-- `foreign` says how to treat the markers of llm-d's producers: '' skips them, because they are in other slots; 'must'
-- fails if this user may not read one; 'may' ignores one that it may not read. `may_have_marker` is true if the token
-- is short enough for a marker under the queue's own name.
-- Returns for each request 1 if a marker of its id holds its token, or 0
-- Guarantees: only reads, and reads from each marker no more than one byte beyond the length of the token.
require_commands('GETRANGE')
local flags = {}
for number, request in ipairs(requests) do
  local id, token = request.id, request.token
  local is_cancelled = request.may_have_marker and marker_equals(cancel_key(id, token), token)
  if not is_cancelled and foreign ~= '' then
    local denied
    is_cancelled, denied = marker_equals('request-cancel:' .. id, token)
    if denied and foreign == 'must' and not string.find(denied.err, '^WRONGTYPE') then error(denied) end
  end
  flags[number] = is_cancelled and 1 or 0
end
return flags
