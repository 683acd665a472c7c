-- Rows lie where clients of the worker's machine can read them: tell those that wait for them, before the
-- rows are stored. A shortcut that nothing depends on: flights stay, and `complete.lua` tells everybody.
-- KEYS[1] a reply stream. ARGV: prefix, the digests as one text, what the memory is called, the clients that are
--       near, with a blank before and behind each
-- Returns how many clients were told.
local prefix, digests, memory, near = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local flights = {}
for at = 1, #digests - 31, 32 do
  flights[#flights + 1] = prefix .. ':flight:' .. string.sub(digests, at, at + 31)
end

local texts, clients = {}, {}
local said, mine -- who waits for the flight before this one, and which of them are near
for n, flight in ipairs(values_of(flights)) do
  local _, _, _, waiting = parts_of(flight)
  if waiting and waiting ~= said then
    said, mine = waiting, {}
    for client in each_of(waiting) do
      if string.find(near, ' ' .. client .. ' ', 1, true) then mine[#mine + 1] = client end
    end
  end
  for _, client in ipairs(waiting and mine or {}) do
    if not texts[client] then
      texts[client] = {}
      clients[#clients + 1] = client
    end
    table.insert(texts[client], string.sub(digests, 32 * n - 31, 32 * n))
  end
end

local told = 0
for _, client in ipairs(clients) do
  if tell(prefix, client, 'near', table.concat(texts[client]), 'in', memory) then told = told + 1 end
end
return told
