-- Find the remaining requests of closed runs of sequences, which are to be answered.
-- Uses: require_commands, common
-- Keys: queue
-- Arguments: max_count: number, max_bytes: number, max_member_bytes: number
-- Returns {location, member, code, why, blob…}. If the first member has more than `max_bytes`, its length is
--         returned in its place, because it needs a call of its own. The same holds for a blob that does not fit
--         beside its member.
-- Guarantees: only reads. The requests stay in their lane until settle_unleased.lua removes them.
local rows, count, size = {}, 0, 0
for _, closed_run in ipairs(call('ZRANGE', CLOSED_RUNS, 0, max_count - 1)) do
  local number, code, message = string.match(closed_run, '^(%d+):([A-Z_]+):(.*)$')
  local at = 0
  repeat
    local names = call('ZRANGE', RUN_QUEUES, '[' .. number .. ':', '(' .. number .. ';', 'BYLEX', 'LIMIT', at, max_count)
    for _, name in ipairs(names) do
      local id = tonumber(string.sub(name, 35))
      local state = id and load_entry(id)
      if state and state[LOCATION] == 'Q' then
        local member_bytes = call('HSTRLEN', MEMBERS, id)
        size = size + math.min(member_bytes, max_member_bytes) + get_blob_bytes(state)
        if count > 0 and size > max_bytes then return rows end
        local member = member_bytes
        if member_bytes <= max_bytes then member = cut_member(call('HGET', MEMBERS, id), max_member_bytes) end
        local blob = load_blob(id, state, member_bytes, max_bytes)
        local row = {'Q:' .. id .. ':' .. state[MOVES], member, code, message, blob}
        for _, value in ipairs(row) do rows[#rows + 1] = value end
        count = count + 1
        if count == max_count or size > max_bytes then return rows end
      end
    end
    at = at + max_count
  until #names < max_count
end
return rows
