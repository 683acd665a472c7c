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
-- ARGV: prefix, client, reply TTL, flight TTL, backlog bound, group, promote, lanes, the jobs' heads as one
--       text, number of adapters, adapters, then the jobs, in the order in which they are to run.
--       A head: digest, then lane, which of the adapters or 0, and deadline or nothing, in 28 characters.
local prefix, client = ARGV[1], ARGV[2]
local reply_ttl, flight_ttl = ARGV[3], ARGV[4]
local group, promote = ARGV[6], ARGV[7] == '1'
local backlog, heads, adapters = tonumber(ARGV[5]), ARGV[9], tonumber(ARGV[10])
local before = 10 + adapters
local count = #ARGV - before
local waiter = ' ' .. client .. ' '

-- Whoever calls it: what makes no sense is refused before anything is written.
if #heads ~= 60 * count or not backlog or not string.find(ARGV[8], '^[1-9]%d?%d?%d?$')
    or #client > 200 or string.find(client, ' ', 1, true)
    or not string.find(flight_ttl, '^[1-9]%d*$') or #flight_ttl > 15 then
  return redis.error_reply('ERR what is asked is no claim')
end

-- The backlog's bound and the lanes, read where they are needed: not for a first job.
local bounds
local function allowed()
  bounds = bounds or given(redis.pcall('HMGET', prefix .. ':bounds', 'backlog', 'lanes', 'used')) or {}
  return tonumber(bounds[1]) or backlog, tonumber(bounds[2]), tonumber(bounds[3] or '1')
end

local lanes = tonumber(ARGV[8])
if lanes > 1 then
  local _, _, used = allowed()
  lanes = used and used >= 1 and math.min(lanes, used) or 1
end
local name = string.sub(KEYS[1], 1, -2)

local streams = {} -- by lane
local function stream_in(lane)
  local stream = streams[lane]
  if not stream then
    local key = lane == 0 and KEYS[1] or name .. lane
    stream = {key = key, name = lane_of(key), backlog = given(redis.pcall('XLEN', key))}
    streams[lane] = stream
  end
  return stream
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

-- What heads say behind digests, which many have in common: where their jobs go, until when, whether
-- their adapter is there, and how a flight goes on behind the id of its job.
local kinds = {}
local function kind_of(said)
  local lane, adapter, deadline = string.match(said, '^ *(%d+) +(%d+) +(%d*)$')
  local stream = stream_in(lanes == 1 and 0 or tonumber(lane) % lanes)
  adapter = tonumber(adapter)
  kinds[said] = {
    stream = stream,
    deadline = deadline,
    runs = adapter == 0 or adapter <= adapters and is_registered(ARGV[10 + adapter]),
    flight = flight_of('', stream.name, deadline, waiter),
  }
  return kinds[said]
end

local results, flights, kinds_of = {}, {}, {}
local result, flight = prefix .. ':result:', prefix .. ':flight:'
for n = 1, count do
  local at = 60 * n
  local digest, said = string.sub(heads, at - 59, at - 28), string.sub(heads, at - 27, at)
  results[n], flights[n], kinds_of[n] = result .. digest, flight .. digest, kinds[said] or kind_of(said)
end

-- The reply stream is the client's sign of life: workers drop what only the dead wait for.
local reply = prefix .. ':reply:' .. client
local fresh = 0
if redis.call('PEXPIRE', reply, reply_ttl) == 0 then
  redis.call('XADD', reply, '*', 'hello', '1')
  redis.call('PEXPIRE', reply, reply_ttl)
  fresh = 1
end

-- What is there of all of them, before the first is claimed.
local may_hit = count_of(results) > 0
local held = values_of(flights)

local added = false
-- Who looks for jobs of others hears of new ones.
local function note_added(stream, id)
  if lanes > 1 then
    note_waiting(prefix, stream, id)
    added = true
  end
end

local most, all -- of jobs in all lanes; how many there are, once it is needed
local function is_full(backlog)
  if backlog == 0 then return false end
  most = most or (allowed())
  if backlog < most / lanes then return false end
  if lanes == 1 then return true end
  if not all then
    all = 0
    for lane = 0, lanes - 1 do all = all + (given(redis.pcall('XLEN', name .. lane)) or 0) end
  end
  return all >= most
end

-- A flight that others wait for, from now on with this client.
local function joined(n, job, lane, due, waiting, stream)
  local kind = kinds_of[n]
  local deadline, wanted = kind.deadline, kind.stream
  -- The job runs for whoever waits longest.
  if due ~= '' and (deadline == '' or tonumber(deadline) > tonumber(due)) then due = deadline end
  waiting = with_client(waiting, client)
  if promote and stream ~= wanted.key then
    -- A group that is not there holds nothing.
    if #(given(redis.pcall('XPENDING', stream, group, job, job, 1)) or {}) == 0 then
      -- Added first: where that is refused, it is still in the other. Where nothing can be taken off there,
      -- it is put nowhere.
      local id = given(redis.pcall('XDEL', stream, '0-0'))
        and given(redis.pcall('XADD', wanted.key, '*', 'job', ARGV[before + n]))
      if id and redis.call('XDEL', stream, job) == 1 then
        job, lane = id, wanted.name
        note_added(wanted.key, id)
      elseif id then
        redis.call('XDEL', wanted.key, id)
      end
    end
  end
  return flight_of(job, lane, due, waiting)
end

local written = {} -- flights that this client has joined, by key
local function join(n, there)
  local job, lane, due, waiting = parts_of(there)
  local _, most_lanes = allowed()
  local stream = job and stream_of(prefix, lane, most_lanes) -- nobody would ever land in another one
  if not stream then return false end
  local flight = flights[n]
  written[flight] = joined(n, job, lane, due, waiting, stream)
  redis.call('SET', flight, written[flight], 'PX', flight_ttl)
  return true
end

local function queue(n, stream)
  if not stream.backlog then return 'b' end
  if is_full(stream.backlog) then
    -- Unless this call has queued the same prompt.
    return stream.first and join(n, given(redis.pcall('GET', flights[n]))) and 'j' or 'f'
  end
  local id = given(redis.pcall('XADD', stream.key, '*', 'job', ARGV[before + n]))
  if not id then return 'b' end
  local flight, text = flights[n], id .. kinds_of[n].flight
  if not redis.call('SET', flight, text, 'PX', flight_ttl, 'NX') then
    -- The same prompt was queued by this call, or what is there is no flight.
    if join(n, given(redis.pcall('GET', flight))) then
      redis.pcall('XDEL', stream.key, id)
      return 'j'
    end
    redis.call('SET', flight, text, 'PX', flight_ttl)
  end
  stream.backlog, stream.first = stream.backlog + 1, stream.first or id
  if all then all = all + 1 end
  return 'q'
end

local answers = {}
for n = 1, count do
  local kind, there = kinds_of[n], held[n]
  if not kind.runs then
    answers[n] = 'a'
  elseif may_hit and has_result(prefix, string.sub(heads, 60 * n - 59, 60 * n - 28)) then
    answers[n] = 'h'
  elseif there and join(n, written[flights[n]] or there) then
    answers[n] = 'j'
  else
    answers[n] = queue(n, kind.stream)
  end
end
for _, stream in pairs(streams) do
  if stream.first then note_added(stream.key, stream.first) end
end
if added then call_idle(prefix, '0') end
return {table.concat(answers), fresh}
