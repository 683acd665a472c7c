-- A worker is done with jobs: tell every waiting client, end the flights, acknowledge and delete.
-- KEYS[1] job stream.
-- ARGV: prefix, group, counter TTL, number of counters, then counter name and increment for each,
--       then per job: digest, stream id, status ('ok' or an error's), error text
local jobs, prefix, group = KEYS[1], ARGV[1], ARGV[2]
local counters = prefix .. ':counters'
local at = 5
for _ = 1, tonumber(ARGV[4]) do
  redis.pcall('HINCRBY', counters, ARGV[at], ARGV[at + 1])
  at = at + 2
end
redis.pcall('PEXPIRE', counters, ARGV[3])

local done = {}
local ids = {}
local others = 0
for i = at, #ARGV, 4 do
  local digest, id, status = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  ids[#ids + 1] = id
  local flight = prefix .. ':flight:' .. digest
  local job, stream, _, waiting = read_flight(flight)
  -- An error of an old delivery says nothing about the job that is queued now.
  if job and (status == 'ok' or job == id) then
    for _, client in ipairs(waiting) do
      if status == 'ok' then
        local list = done[client]
        if list then list[#list + 1] = digest else done[client] = {digest} end
      else
        tell(prefix, client, 'digest', digest, 'status', status, 'error', ARGV[i + 3])
      end
    end
    redis.call('DEL', flight)
    if (job ~= id or stream ~= jobs) and is_job_stream(prefix, stream) then
      take_off(stream, group, job)
      others = others + 1
    end
  end
end
for client, list in pairs(done) do
  tell(prefix, client, 'ok', table.concat(list))
end
for i = 1, #ids, 1000 do
  local last = math.min(i + 999, #ids)
  redis.pcall('XACK', jobs, group, unpack(ids, i, last))
  redis.pcall('XDEL', jobs, unpack(ids, i, last))
end
return #ids + others
