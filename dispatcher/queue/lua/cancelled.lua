-- Say which requests are to be cancelled.
-- KEYS   own…
-- ARGV   how to treat the markers of llm-d's producers: '' skips them, because they are in other slots; 'must' fails if this
--        user may not read one; 'may' ignores one that it may not read. Then for each request: id, token, 1 if the
--        token is short enough for a marker under the queue's own name, or 0
-- Returns for each request 1 if a marker of its id holds its token, or 0
-- Keeps: only reads, and from each marker no more than one byte beyond the length of the token.
need('GETRANGE')
local foreign, told = ARGV[1], {}
for at = 2, #ARGV, 3 do
  local id, token = ARGV[at], ARGV[at + 1]
  local found = ARGV[at + 2] == '1' and holds(cancel_key(id, token), token)
  if not found and foreign ~= '' then
    local refusal
    found, refusal = holds('request-cancel:' .. id, token)
    if refusal and foreign == 'must' and not string.find(refusal.err, '^WRONGTYPE') then error(refusal) end
  end
  told[#told + 1] = found and 1 or 0
end
return told
