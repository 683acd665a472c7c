-- A worker is done with jobs: tell every waiting client, end the flights, acknowledge and delete,
-- and enter what was stored into the account.
-- KEYS[1] job stream, KEYS[2] account.
-- ARGV: prefix, group, counter TTL, bytes stored, their life in ms, the digests stored as one text,
--       number of counters, then counter name and increment for each,
--       then per job: digest, stream id, status ('ok' or an error's), error text
-- Returns {jobs acknowledged, bytes that the account holds}.
local jobs, account, prefix, group = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local stored = tonumber(ARGV[4])
local counters = prefix .. ':counters'
local at = 8
for _ = 1, tonumber(ARGV[7]) do
  redis.call('HINCRBY', counters, ARGV[at], ARGV[at + 1])
  at = at + 2
end
redis.call('PEXPIRE', counters, ARGV[3])

local done = {}
local ids = {}
for i = at, #ARGV, 4 do
  local digest, id, status = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  ids[#ids + 1] = id
  local flight = prefix .. ':flight:' .. digest
  local fields = redis.call('HGETALL', flight)
  local job, stream
  for f = 1, #fields, 2 do
    if fields[f] == 'job' then job = fields[f + 1] end
    if fields[f] == 'stream' then stream = fields[f + 1] end
  end
  -- An error of an old delivery says nothing about the job that is queued now.
  if job and (status == 'ok' or job == id) then
    for f = 1, #fields, 2 do
      if string.sub(fields[f], 1, 2) == 'c:' then
        local client = string.sub(fields[f], 3)
        if status == 'ok' then
          local list = done[client]
          if list then list[#list + 1] = digest else done[client] = {digest} end
        else
          local reply = prefix .. ':reply:' .. client
          if redis.call('EXISTS', reply) == 1 then
            redis.call('XADD', reply, '*', 'digest', digest, 'status', status, 'error', ARGV[i + 3])
          end
        end
      end
    end
    redis.call('DEL', flight)
    if stream and stream ~= jobs then
      redis.pcall('XACK', stream, group, job) -- its group may be gone
      redis.call('XDEL', stream, job)
    elseif job ~= id then
      ids[#ids + 1] = job
    end
  end
end
local told = {}
for client, list in pairs(done) do
  local reply = prefix .. ':reply:' .. client
  -- A reply stream that is gone belongs to a client that is gone: do not make it anew.
  if redis.call('EXISTS', reply) == 1 then
    told[#told + 1] = client
    told[#told + 1] = redis.call('XADD', reply, '*', 'ok', table.concat(list))
  end
end
for i = 1, #ids, 1000 do
  local last = math.min(i + 999, #ids)
  redis.call('XACK', jobs, group, unpack(ids, i, last))
  redis.call('XDEL', jobs, unpack(ids, i, last))
end

-- Each entry has the sum of all, itself included, and who was told where: until a client has taken
-- that notice off its reply stream, it is about to read. The order of the fields counts: evict.lua.
local last = redis.pcall('XREVRANGE', account, '+', '-', 'COUNT', 1)
if last['err'] then -- damaged: begin anew
  redis.call('DEL', account)
  last = {}
end
last = last[1]
local held = stored + (last and tonumber(last[2][2]) or 0)
if stored > 0 then
  redis.call('XADD', account, '*', 'held', string.format('%.0f', held), 'bytes', ARGV[4],
    'life', ARGV[5], 'digests', ARGV[6], unpack(told, 1, math.min(#told, 2000)))
  if last and last[2][8] == '' then redis.call('XDEL', account, last[1]) end -- only the sum
end
return {#ids, held}
