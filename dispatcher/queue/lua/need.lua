-- A right that is missing would end a script half way: a request gone, a result written twice. So each asks for
-- its rights before it writes. Redis before 7 cannot be asked. (It looks for keys where the command would have
-- them, and some versions look behind the last argument: hence a key in each place.)
local function need(...)
  local missing, key = {}, KEYS[1]
  for _, name in ipairs({...}) do
    if redis.acl_check_cmd and not redis.acl_check_cmd(name, key, key, key) then
      missing[#missing + 1] = string.lower(name)
    end
  end
  if #missing > 0 then error({err = 'NOPERM this user may not run: ' .. table.concat(missing, ', ')}) end
end
