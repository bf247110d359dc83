-- How long a list lives: one that this push made for ttl_s, one that has a time to live for ttl_s at least. One that
-- has none is kept by somebody, and stays. GT says both in one; Redis before 7 knows no GT, and every list gets it.
local function keep(list, is_new, ttl_s)
  if ttl_s <= 0 then return end
  if is_new or type(redis.pcall('EXPIRE', list, ttl_s, 'GT')) == 'table' then redis.call('EXPIRE', list, ttl_s) end
end
