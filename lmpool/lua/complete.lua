-- A worker is done with jobs: tell every waiting client, end the flights, acknowledge and delete,
-- and enter what was stored into the account.
-- KEYS[1] account, the others job streams.
-- ARGV: prefix, group, counter TTL, bytes stored, their life in ms, the digests stored as one text,
--       number of counters, then counter name and increment for each,
--       then for each stream the number of its jobs, and per job: digest, stream id, status ('ok' or
--       an error's), error text
-- Returns {jobs acknowledged, bytes that the account holds, or 0 where nothing was stored}.
local account, prefix, group = KEYS[1], ARGV[1], ARGV[2]
local stored = tonumber(ARGV[4])
local counters = prefix .. ':counters'
local at = 8
for _ = 1, math.min(tonumber(ARGV[7]), #ARGV) do -- whoever calls it: it comes to its end
  redis.pcall('HINCRBY', counters, ARGV[at], ARGV[at + 1])
  at = at + 2
end
redis.pcall('PEXPIRE', counters, ARGV[3])

local done = {}
local acknowledged = 0

local function end_job(jobs, digest, id, status, text)
  local flight = prefix .. ':flight:' .. digest
  local job, stream, _, waiting = read_flight(flight)
  -- An error of an old delivery says nothing about the job that is queued now.
  if job and (status == 'ok' or job == id) then
    for _, client in ipairs(waiting) do
      if status == 'ok' then
        local list = done[client]
        if list then list[#list + 1] = digest else done[client] = {digest} end
      else
        tell(prefix, client, 'digest', digest, 'status', status, 'error', text)
      end
    end
    redis.call('DEL', flight)
    if (job ~= id or stream ~= jobs) and is_job_stream(prefix, stream) then
      take_off(stream, group, job)
      acknowledged = acknowledged + 1
    end
  end
end

for s = 2, #KEYS do
  local ids = {}
  local last = at + 4 * tonumber(ARGV[at])
  for i = at + 1, last, 4 do
    end_job(KEYS[s], ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3])
    ids[#ids + 1] = ARGV[i + 1]
  end
  for i = 1, #ids, 1000 do
    local upto = math.min(i + 999, #ids)
    redis.pcall('XACK', KEYS[s], group, unpack(ids, i, upto))
    redis.pcall('XDEL', KEYS[s], unpack(ids, i, upto))
  end
  acknowledged = acknowledged + #ids
  at = last + 1
end

local told = {}
for client, list in pairs(done) do
  local id = tell(prefix, client, 'ok', table.concat(list))
  if id then
    told[#told + 1] = client
    told[#told + 1] = id
  end
end

if stored == 0 then return {acknowledged, 0} end

-- Each entry has the sum of all, itself included, and who was told where: until a client has taken
-- that notice off its reply stream, it is about to read. The order of the fields counts: evict.lua.
local entry = {'*', 'held', '', 'bytes', ARGV[4], 'life', ARGV[5], 'digests', ARGV[6],
  unpack(told, 1, math.min(#told, 2000))}
-- The sum is counted beside the account, too: reading the newest entry costs more than adding one.
local sum, life = prefix .. ':held', tonumber(ARGV[5])
local held = given(redis.pcall('INCRBY', sum, ARGV[4]))
entry[3] = string.format('%.0f', held or 0)
if not held or held <= stored
    or not given(redis.pcall('XADD', account, 'NOMKSTREAM', unpack(entry))) then
  -- The account begins, or evict.lua changed it, or something is damaged: the entries are right.
  local last = given(redis.pcall('XREVRANGE', account, '+', '-', 'COUNT', 1))
  if not last then redis.call('DEL', account) end
  last = last and last[1]
  held = stored + (last and tonumber(last[2][2]) or 0)
  entry[3] = string.format('%.0f', held)
  redis.pcall('XADD', account, unpack(entry))
  redis.pcall('SET', sum, entry[3], 'PX', life)
  if last and last[2][8] == '' then redis.call('XDEL', account, last[1]) end -- only the sum
end
-- By the end of its life all that this entry names has ended.
if redis.call('PTTL', account) < life then redis.pcall('PEXPIRE', account, 2 * life) end
return {acknowledged, held}
