-- Find requests of sequences that will not go any more and are to be answered.
-- KEYS   own…
-- ARGV   most, bytes, bytes of the largest member that is told whole
-- Returns {place, member, code, why…}; where the first member has more than `bytes`, how many in its place: it wants a call of
--         its own
-- Keeps: reads only. They lie in their lane until `expire` takes them from there.
local most, bytes, largest = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local found, count, size = {}, 0, 0
for _, over in ipairs(call('ZRANGE', OVER, 0, most - 1)) do
  local number, code, why = string.match(over, '^(%d+):([A-Z_]+):(.*)$')
  local at = 0
  repeat
    local names = call('ZRANGE', TURNS, '[' .. number .. ':', '(' .. number .. ';', 'BYLEX', 'LIMIT', at, most)
    for _, name in ipairs(names) do
      local id = tonumber(string.sub(name, 35))
      local state = id and load(id)
      if state and state[WHERE] == 'Q' then
        local own = call('HSTRLEN', MEMBERS, id)
        size = size + math.min(own, largest)
        if count > 0 and size > bytes then return found end
        local member = own
        if own <= bytes then member = shortened(call('HGET', MEMBERS, id), largest) end
        for _, value in ipairs({'Q:' .. id .. ':' .. state[MOVES], member, code, why}) do found[#found + 1] = value end
        count = count + 1
        if count == most or size > bytes then return found end
      end
    end
    at = at + most
  until #names < most
end
return found
