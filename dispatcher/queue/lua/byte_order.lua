-- The order of strings by bytes, which is that of sorted sets.

-- Compare two strings byte by byte. The operator `<` of Lua compares by the locale of the server, and Redis does not.
local function is_bytewise_before(a, b)
  -- A binary search for the length of the common beginning.
  local equal_bytes, longest = 0, math.min(#a, #b)
  while equal_bytes < longest do
    local half = math.floor((equal_bytes + longest + 1) / 2)
    if string.sub(a, 1, half) == string.sub(b, 1, half) then equal_bytes = half else longest = half - 1 end
  end
  if equal_bytes == #a or equal_bytes == #b then return #a < #b end
  return string.byte(a, equal_bytes + 1) < string.byte(b, equal_bytes + 1)
end
