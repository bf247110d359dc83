-- Delete a marker of llm-d's producers of a finished request, if it still belongs to that request.
-- Keys: MARKER
-- Arguments: token
-- MARKER is request-active:<id> or request-cancel:<id>.
-- Returns 1 if the marker was deleted
-- Guarantees: the marker of a later request with the same id stays.
-- The producer chooses the size of the value, so only one byte more than the token is read.
if redis.pcall('GETRANGE', MARKER, 0, #token) ~= token then return 0 end
return redis.call('DEL', MARKER)
