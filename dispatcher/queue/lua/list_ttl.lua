-- Set the lifetime of a list after a push. A list that the push created gets `ttl_s`; a list with a lifetime gets
-- `ttl_s` at least; a list without one was made by somebody else and keeps none. EXPIRE with GT does this in one
-- command. Redis before 7 has no GT (the call fails), and there every list gets `ttl_s`.
local function set_list_ttl(list, is_new, ttl_s)
  if ttl_s <= 0 then return end
  if is_new or type(redis.pcall('EXPIRE', list, ttl_s, 'GT')) == 'table' then redis.call('EXPIRE', list, ttl_s) end
end
