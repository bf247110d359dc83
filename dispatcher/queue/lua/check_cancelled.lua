-- Check which requests are to be cancelled.
-- KEYS   common keys…
-- ARGV   how to treat the markers of llm-d's producers: '' skips them, because they are in other slots; 'must' fails
--        if this user may not read one; 'may' ignores one that it may not read. Then for each request: id, token, 1
--        if the token is short enough for a marker under the queue's own name, or 0
-- Returns for each request 1 if a marker of its id holds its token, or 0
-- Guarantees: only reads, and reads from each marker no more than one byte beyond the length of the token.
require_commands('GETRANGE')
local foreign, flags = ARGV[1], {}
for at = 2, #ARGV, 3 do
  local id, token = ARGV[at], ARGV[at + 1]
  local is_cancelled = ARGV[at + 2] == '1' and marker_equals(cancel_key(id, token), token)
  if not is_cancelled and foreign ~= '' then
    local denied
    is_cancelled, denied = marker_equals('request-cancel:' .. id, token)
    if denied and foreign == 'must' and not string.find(denied.err, '^WRONGTYPE') then error(denied) end
  end
  flags[#flags + 1] = is_cancelled and 1 or 0
end
return flags
