-- Before a batch that has waited is run: drop what nobody waits for any more.
--   r  run it    x  its result is there already    w  withdrawn (dropped here)    e  expired (too)
-- KEYS[1] and on: job streams. ARGV: prefix, group, counter TTL, then for each stream the number of its jobs, and
--       per job: digest, stream id
local prefix, group = ARGV[1], ARGV[2]
local now = now_ms()
local answers = {}

local replies = {} -- by client
local function is_there(client)
  if replies[client] == nil then
    replies[client] = redis.call('EXISTS', prefix .. ':reply:' .. client) == 1
  end
  return replies[client]
end

-- What the flight of the last job to be run says behind the id: most say the same.
local said
local function judge(jobs, digest, id, text)
  local flight = prefix .. ':flight:' .. digest
  local job, _, deadline, clients = parts_of(text)
  if not job then read_flight(flight) end -- what is none is taken away
  local waiting = {}
  for client in each_of(job == id and clients or '') do
    if is_there(client) then waiting[#waiting + 1] = client end
  end
  local expired = #waiting > 0 and deadline ~= '' and tonumber(deadline) <= now
  if #waiting > 0 and not expired then
    said = string.sub(text, #id + 1)
    return 'r'
  end
  if job == id then redis.call('DEL', flight) end
  take_off(jobs, group, id)
  if not expired then return 'w' end
  for _, client in ipairs(waiting) do
    tell(prefix, client, 'digest', digest, 'status', 'expired', 'error', '')
  end
  redis.pcall('HINCRBY', prefix .. ':counters', 'expired', 1)
  redis.pcall('PEXPIRE', prefix .. ':counters', ARGV[3])
  return 'e'
end

local at = 4
for _, jobs in ipairs(KEYS) do
  local last = math.min(at + 2 * tonumber(ARGV[at]), #ARGV - 1) -- whoever calls it: it comes to its end
  local results, flights = {}, {}
  for i = at + 1, last, 2 do
    results[#results + 1] = prefix .. ':result:' .. ARGV[i]
    flights[#flights + 1] = prefix .. ':flight:' .. ARGV[i]
  end
  local may_be_there, held = count_of(results) > 0, values_of(flights)
  for n = 1, #flights do
    local digest, id, answer = ARGV[at + 2 * n - 1], ARGV[at + 2 * n], 'r'
    if may_be_there and has_result(prefix, digest) then
      answer = 'x'
    elseif not said or held[n] ~= id .. said then
      answer = judge(jobs, digest, id, held[n])
    end
    answers[#answers + 1] = answer
  end
  at = last + 1
end
return table.concat(answers)
