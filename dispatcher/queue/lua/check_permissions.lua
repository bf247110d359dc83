-- Check what this user may do, without doing it.
-- Keys: none
-- List words: call: number, text
-- Each call is the words with its number, from 1 on.
-- Returns 1 or 0 for each call; nothing if the server cannot be asked (Redis before 7)
-- Guarantees: neither reads nor writes.
if not redis.acl_check_cmd then return {} end
local calls, flags = {}, {}
for _, word in ipairs(words) do
  local call = calls[word.call] or {}
  calls[word.call], call[#call + 1] = call, word.text
end
for number, call in ipairs(calls) do flags[number] = redis.acl_check_cmd(unpack(call)) and 1 or 0 end
return flags
