-- Raise NOPERM if this user may not run one of these commands. A permission that is missing in the middle of a script
-- would leave a request lost or a result written twice, so each script calls this before its first write. Redis
-- before 7 cannot be asked. `acl_check_cmd` looks for keys at the positions that they have in the command, and some
-- servers look beyond the last argument: hence a key at each position.
local function require_commands(...)
  local missing, key = {}, KEYS[1]
  for _, command in ipairs({...}) do
    if redis.acl_check_cmd and not redis.acl_check_cmd(command, key, key, key) then
      missing[#missing + 1] = string.lower(command)
    end
  end
  if #missing > 0 then error({err = 'NOPERM this user may not run: ' .. table.concat(missing, ', ')}) end
end
