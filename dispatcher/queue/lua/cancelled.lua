-- Say which requests are to be cancelled.
-- KEYS   own…
-- ARGV   markers of llm-d's producers: '' they lie in other slots, 'must' this user has to be able to read them, 'may' those
--        that it cannot read count as none; then for each request: id, token, 1 if the token is short enough for a marker
--        under the queue's own name, or 0
-- Returns for each 1: a marker of its id holds its token; or 0
-- Keeps: reads only, of each marker no more than its request's token has bytes.
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
