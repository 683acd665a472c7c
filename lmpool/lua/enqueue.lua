-- Claim digests for a client: one answer each, all at once.
--   h  a result is there          j  another asked already: wait with it
--   q  the job is queued          f  the backlog is at its bound: nothing was done
--   a  the adapter is not the registered one any more
--   b  the stream takes no entry: nothing was done, until a worker has mended it
-- A job that waits in another stream comes into this one if `promote` is 1 and nobody has it yet.
-- The backlog's bound is the workers'; the client's holds where no worker has written one. It is that of
-- all lanes together: one that has no more than its share of it is not full.
-- A lane beyond those in use, as far as workers have said how many are, is one of these.
-- KEYS[1]: the job stream of lane 0 and one priority. The other keys are derived from it and from the shard's
-- prefix: they share its slot.
-- ARGV: prefix, client, reply TTL, flight TTL, backlog bound, group, promote, lanes, then per job, in the
--       order in which they are to run: lane, digest, deadline or '', adapter or '', job
local prefix, client = ARGV[1], ARGV[2]
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
  bounds = bounds or given(redis.pcall('HMGET', prefix .. ':bounds', 'backlog', 'lanes', 'used')) or {}
  return tonumber(bounds[1] or ARGV[5]), tonumber(bounds[2]), tonumber(bounds[3] or '1')
end

local lanes = tonumber(ARGV[8])
if lanes > 1 then
  local _, _, used = allowed()
  lanes = used and used >= 1 and math.min(lanes, used) or 1
end
local name = string.sub(KEYS[1], 1, -2)
local all -- jobs in all lanes, once it is needed
local function is_full(backlog)
  if backlog == 0 then return false end
  local most = allowed()
  if backlog < most / lanes then return false end
  if lanes == 1 then return true end
  if not all then
    all = 0
    for lane = 0, lanes - 1 do all = all + (given(redis.pcall('XLEN', name .. lane)) or 0) end
  end
  return all >= most
end

local answers = {}
local added = false

-- Who looks for jobs of others hears of new ones.
local function note_added(jobs, id)
  if lanes > 1 then
    note_waiting(prefix, jobs, id)
    added = true
  end
end

local function claim(jobs, backlog, i)
  local digest, deadline, adapter = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local flight = prefix .. ':flight:' .. digest
  if adapter ~= '' then
    local name, fingerprint = string.match(adapter, '^(.*)@([^@]*)$')
    local entry = name and given(redis.pcall('HGET', prefix .. ':adapters', name))
    if not (entry and string.sub(entry, 1, #fingerprint + 1) == fingerprint .. '\n') then return 'a' end
  end
  if has_result(prefix, digest) then return 'h' end
  local due = redis.pcall('HGET', flight, 'deadline')
  local job, stream
  if due then
    local held = redis.pcall('HMGET', flight, 'job', 'stream')
    job, stream = held[1], held[2]
    local _, most_lanes = allowed()
    if not (job and is_job_stream(prefix, stream, most_lanes) and (due == '' or tonumber(due))) then
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
        if id then
          redis.call('HSET', flight, 'job', id, 'stream', jobs)
          note_added(jobs, id)
        end
      end
    end
    return 'j'
  end
  if not backlog then return 'b' end
  if is_full(backlog) then return 'f' end
  local id = given(redis.pcall('XADD', jobs, '*', 'job', ARGV[i + 3]))
  if not id then return 'b' end
  redis.call('HSET', flight, 'job', id, 'stream', jobs, 'deadline', deadline, waiter, '')
  redis.call('PEXPIRE', flight, flight_ttl)
  return 'q', id
end

local streams, backlogs, first = {}, {}, {} -- by lane
for i = 9, #ARGV, 5 do
  local lane = lanes == 1 and 0 or math.floor(tonumber(ARGV[i])) % lanes
  local jobs = streams[lane]
  if not jobs then
    jobs = lane == 0 and KEYS[1] or name .. lane
    streams[lane] = jobs
    backlogs[lane] = given(redis.pcall('XLEN', jobs))
  end
  local answer, id = claim(jobs, backlogs[lane], i + 1)
  if id then
    backlogs[lane] = backlogs[lane] + 1
    if all then all = all + 1 end
    first[lane] = first[lane] or id
  end
  answers[#answers + 1] = answer
end
for lane, id in pairs(first) do note_added(streams[lane], id) end
if added then call_idle(prefix, '0') end
return {table.concat(answers), fresh}
