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
local waiter = ' ' .. client .. ' '

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

-- Whether that is the registered adapter of its name.
local registered = {}
local function is_registered(adapter)
  if registered[adapter] == nil then
    local name, fingerprint = string.match(adapter, '^(.*)@([^@]*)$')
    local entry = name and given(redis.pcall('HGET', prefix .. ':adapters', name))
    registered[adapter] = entry and string.sub(entry, 1, #fingerprint + 1) == fingerprint .. '\n' or false
  end
  return registered[adapter]
end

-- What is there of all of them, before the first is claimed.
local results, flights = {}, {}
for i = 10, #ARGV, 5 do
  results[#results + 1] = prefix .. ':result:' .. ARGV[i]
  flights[#flights + 1] = prefix .. ':flight:' .. ARGV[i]
end
local may_hit = count_of(results) > 0
local held = values_of(flights)
local written = {} -- since then, by key
local function write(flight, ...)
  local text = flight_of(...)
  redis.call('SET', flight, text, 'PX', flight_ttl)
  written[flight] = text
end

local function claim(n, jobs, name, backlog, i)
  local deadline, adapter = ARGV[i + 1], ARGV[i + 2]
  if adapter ~= '' and not is_registered(adapter) then return 'a' end
  if may_hit and has_result(prefix, ARGV[i]) then return 'h' end
  local flight = flights[n]
  local job, lane, due, waiting = parts_of(written[flight] or held[n])
  local stream
  if job then
    local _, most_lanes = allowed()
    stream = stream_of(prefix, lane, most_lanes) -- nobody would ever land in another one
  end
  if stream then
    -- The job runs for whoever waits longest.
    if due ~= '' and (deadline == '' or tonumber(deadline) > tonumber(due)) then due = deadline end
    if not string.find(waiting, waiter, 1, true) then waiting = waiting .. client .. ' ' end
    if promote and stream ~= jobs then
      -- A group that is not there holds nothing: an error is as empty as an empty list.
      if #redis.pcall('XPENDING', stream, group, job, job, 1) == 0
          and redis.pcall('XDEL', stream, job) == 1 then
        local id = given(redis.pcall('XADD', jobs, '*', 'job', ARGV[i + 3]))
        if id then
          job, lane = id, name
          note_added(jobs, id)
        end
      end
    end
    write(flight, job, lane, due, waiting)
    return 'j'
  end
  if not backlog then return 'b' end
  if is_full(backlog) then return 'f' end
  local id = given(redis.pcall('XADD', jobs, '*', 'job', ARGV[i + 3]))
  if not id then return 'b' end
  write(flight, id, name, deadline, waiter)
  return 'q', id
end

local streams, names, backlogs, first = {}, {}, {}, {} -- by lane
for n = 1, #flights do
  local i = 5 * n + 4
  local lane = lanes == 1 and 0 or math.floor(tonumber(ARGV[i])) % lanes
  local jobs = streams[lane]
  if not jobs then
    jobs = lane == 0 and KEYS[1] or name .. lane
    streams[lane], names[lane] = jobs, lane_of(jobs)
    backlogs[lane] = given(redis.pcall('XLEN', jobs))
  end
  local answer, id = claim(n, jobs, names[lane], backlogs[lane], i + 1)
  if id then
    backlogs[lane] = backlogs[lane] + 1
    if all then all = all + 1 end
    first[lane] = first[lane] or id
  end
  answers[n] = answer
end
for lane, id in pairs(first) do note_added(streams[lane], id) end
if added then call_idle(prefix, '0') end
return {table.concat(answers), fresh}
