-- The order of strings by bytes, which is that of the members of sorted sets with equal scores.
-- Uses: common

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

-- Return a score as text that sorts as the number does. It consists of digits and a to f, which every locale sorts alike.
local function sortable_score(score)
  -- Big-endian doubles sort like their bytes if the sign bit of positive numbers is set and all bits of negative numbers
  -- are inverted. Adding 0 makes a negative zero zero.
  local bytes, hex = struct.pack('>d', parse_score(score) + 0), {}
  local negative = string.byte(bytes) >= 128
  for at = 1, 8 do
    local byte = string.byte(bytes, at)
    hex[at] = string.format('%02x', negative and 255 - byte or at == 1 and byte + 128 or byte)
  end
  return table.concat(hex)
end
