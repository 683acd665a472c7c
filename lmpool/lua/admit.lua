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

local function judge(jobs, digest, id)
  local answer
  if has_result(prefix, digest) then
    answer = 'x'
  else
    local flight = prefix .. ':flight:' .. digest
    local job, _, deadline, clients = read_flight(flight)
    local waiting = {}
    for client in each_of(job == id and clients or '') do
      if is_there(client) then waiting[#waiting + 1] = client end
    end
    if #waiting == 0 then
      answer = 'w'
    elseif deadline ~= '' and tonumber(deadline) <= now then
      answer = 'e'
      for _, client in ipairs(waiting) do
        tell(prefix, client, 'digest', digest, 'status', 'expired', 'error', '')
      end
    else
      answer = 'r'
    end
    if answer ~= 'r' then
      if job == id then redis.call('DEL', flight) end
      take_off(jobs, group, id)
      if answer == 'e' then
        redis.pcall('HINCRBY', prefix .. ':counters', 'expired', 1)
        redis.pcall('PEXPIRE', prefix .. ':counters', ARGV[3])
      end
    end
  end
  return answer
end

local at = 4
for _, jobs in ipairs(KEYS) do
  local last = math.min(at + 2 * tonumber(ARGV[at]), #ARGV - 1) -- whoever calls it: it comes to its end
  for i = at + 1, last, 2 do answers[#answers + 1] = judge(jobs, ARGV[i], ARGV[i + 1]) end
  at = last + 1
end
return table.concat(answers)
