-- Delete a finished request's marker, where it still is that request's.
-- KEYS   request-active:<id> or request-cancel:<id>
-- ARGV   the request's token
-- Returns 1 if it was deleted
-- Keeps: the marker of a later request with the same id stays.
if redis.pcall('GETRANGE', KEYS[1], 0, #ARGV[1]) ~= ARGV[1] then return 0 end -- the value may be of any size
return redis.call('DEL', KEYS[1])
