-- Claim digests for a client: one answer each, all at once.
--   h  a result is there          j  another asked already: wait with it
--   q  the job is queued          f  the backlog is at its bound: nothing was done
--   a  the adapter is not the registered one any more
--   b  the stream takes no entry: nothing was done, until a worker has mended it
-- A job that waits in the other stream comes into this one if `promote` is 1 and nobody has it yet.
-- The backlog's bound is the workers'; the client's holds where no worker has written one.
-- KEYS[1] job stream. The other keys are derived from the shard's prefix: they share its slot.
-- ARGV: prefix, client, reply TTL, flight TTL, backlog bound, group, promote, then per job:
--       digest, deadline or '', adapter or '', job
local jobs, prefix, client = KEYS[1], ARGV[1], ARGV[2]
local reply_ttl, flight_ttl = ARGV[3], ARGV[4]
local group, promote = ARGV[6], ARGV[7] == '1'
local waiter = 'c:' .. client

-- The reply stream is the client's sign of life: workers drop what only the dead wait for.
local reply = prefix .. ':reply:' .. client
local fresh = 0
if redis.call('PEXPIRE', reply, reply_ttl) == 0 then
  redis.call('XADD', reply, '*', 'hello', '1')
  redis.call('PEXPIRE', reply, reply_ttl)
  fresh = 1
end

-- The backlog's bound and the lanes, read where they are needed: not for a first job.
local bounds
local function allowed()
  bounds = bounds or given(redis.pcall('HMGET', prefix .. ':bounds', 'backlog', 'lanes')) or {}
  return tonumber(bounds[1] or ARGV[5]), tonumber(bounds[2])
end

local backlog = given(redis.pcall('XLEN', jobs))
local answers = {}
for i = 8, #ARGV, 4 do
  local digest, deadline, adapter = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local flight = prefix .. ':flight:' .. digest
  local answer
  local known = true
  if adapter ~= '' then
    local name, fingerprint = string.match(adapter, '^(.*)@([^@]*)$')
    local entry = name and given(redis.pcall('HGET', prefix .. ':adapters', name))
    known = entry and string.sub(entry, 1, #fingerprint + 1) == fingerprint .. '\n'
  end
  if not known then
    answer = 'a'
  elseif has_result(prefix, digest) then
    answer = 'h'
  else
    local due = redis.pcall('HGET', flight, 'deadline')
    local job, stream
    if due then
      local held = redis.pcall('HMGET', flight, 'job', 'stream')
      job, stream = held[1], held[2]
      local _, lanes = allowed()
      if not (job and is_job_stream(prefix, stream, lanes) and (due == '' or tonumber(due))) then
        redis.call('DEL', flight) -- no client wrote this: nobody would ever land in it
        due = nil
      end
    end
    if due then
      -- The job runs for whoever waits longest.
      if due ~= '' and (deadline == '' or tonumber(deadline) > tonumber(due)) then
        redis.call('HSET', flight, waiter, '', 'deadline', deadline)
      else
        redis.call('HSET', flight, waiter, '')
      end
      redis.call('PEXPIRE', flight, flight_ttl)
      if promote and stream ~= jobs then
        -- A group that is not there holds nothing: an error is as empty as an empty list.
        if #redis.pcall('XPENDING', stream, group, job, job, 1) == 0
            and redis.pcall('XDEL', stream, job) == 1 then
          local id = given(redis.pcall('XADD', jobs, '*', 'job', ARGV[i + 3]))
          if id then redis.call('HSET', flight, 'job', id, 'stream', jobs) end
        end
      end
      answer = 'j'
    elseif not backlog then
      answer = 'b'
    elseif backlog > 0 and backlog >= (allowed()) then
      answer = 'f'
    else
      local id = given(redis.pcall('XADD', jobs, '*', 'job', ARGV[i + 3]))
      if id then
        redis.call('HSET', flight, 'job', id, 'stream', jobs, 'deadline', deadline, waiter, '')
        redis.call('PEXPIRE', flight, flight_ttl)
        backlog = backlog + 1
        answer = 'q'
      else
        answer = 'b'
      end
    end
  end
  answers[#answers + 1] = answer
end
return {table.concat(answers), fresh}
