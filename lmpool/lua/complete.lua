-- A worker is done with jobs: tell every waiting client, end the flights, acknowledge and delete,
-- and enter what was stored into the account.
-- KEYS[1] account, the others job streams.
-- ARGV: prefix, group, counter TTL, bytes stored, their life in ms, the digests stored as one text,
--       number of counters, then counter name and increment for each,
--       then for each stream the number of its jobs whose answers are stored, which are the next ones of the
--       digests, and their stream ids; and the number of its other jobs, and per job: digest, stream id,
--       status ('ok' or an error's), error text
-- Returns {jobs acknowledged, bytes that the account holds, or 0 where nothing was stored}.
local account, prefix, group = KEYS[1], ARGV[1], ARGV[2]
local stored, digests = tonumber(ARGV[4]), ARGV[6]
local counters = prefix .. ':counters'
local behind_counters = 8 + 2 * math.min(tonumber(ARGV[7]), #ARGV) -- whoever calls it: it comes to its end
local at = behind_counters

-- Redis lets a script go on that has begun to write, also where the memory is full: who waits is told.
local lasts = redis.pcall('PEXPIRE', counters, ARGV[3])

-- Once all else is done: what ends the script has it called again, with the same counters.
local function add_counters()
  for c = 8, behind_counters - 1, 2 do
    redis.pcall('HINCRBY', counters, ARGV[c], ARGV[c + 1])
  end
  if lasts ~= 1 then redis.pcall('PEXPIRE', counters, ARGV[3]) end
end

-- Texts of digests that are ok, by the clients that wait for them, which are the same for most.
local done, groups = {}, {}
local acknowledged = 0

local function note_done(waiting, text)
  local texts = done[waiting]
  if texts then
    texts[#texts + 1] = text
  else
    done[waiting] = {text}
    groups[#groups + 1] = waiting
  end
end

-- A flight ends whose job is perhaps another delivery than the one that was run, which is not to be run.
local function drop_other(jobs, id, job, lane)
  local stream = stream_of(prefix, lane)
  if stream and (job ~= id or stream ~= jobs) then
    take_off(stream, group, job)
    acknowledged = acknowledged + 1
  end
end

local from = 1 -- in the digests that are stored
local function end_stored(jobs, first, last)
  local flights, flight, start, count = {}, prefix .. ':flight:', from, last - first + 1
  for n = 1, count do
    flights[n] = flight .. string.sub(digests, from, from + 31)
    from = from + 32
  end
  local held = values_of(flights)
  -- What flights in succession say behind the ids of their jobs, who waits, and the first that was not
  -- noted: they are noted together.
  local said, clients, begun
  local function note_until(n)
    if begun then note_done(clients, string.sub(digests, start + 32 * begun - 32, start + 32 * n - 1)) end
    begun = nil
  end
  local ended -- where there are other deliveries: one may be delivered twice
  for n = 1, count do
    local text, id = held[n], ARGV[first + n - 1]
    if said and text == id .. said and not (ended and ended[flights[n]]) then
      begun = begun or n
    else
      note_until(n - 1)
      local job, lane, _, waiting = parts_of(text)
      if job == id and stream_of(prefix, lane) == jobs and not (ended and ended[flights[n]]) then
        said, clients, begun = string.sub(text, #id + 1), waiting, n
      elseif job then
        if not ended then
          ended = {}
          for e = 1, n - 1 do ended[flights[e]] = true end
        end
        if not ended[flights[n]] then
          note_done(waiting, string.sub(digests, start + 32 * n - 32, start + 32 * n - 1))
          drop_other(jobs, id, job, lane)
        end
      end
    end
    if ended then ended[flights[n]] = true end
  end
  note_until(count)
  delete_all(flights)
end

local function end_other(jobs, digest, id, status, text)
  local flight = prefix .. ':flight:' .. digest
  local job, lane, _, waiting = read_flight(flight)
  -- An error of an old delivery says nothing about the job that is queued now.
  if not job or (status ~= 'ok' and job ~= id) then return end
  if status == 'ok' then
    note_done(waiting, digest)
  else
    for client in each_of(waiting) do
      tell(prefix, client, 'digest', digest, 'status', status, 'error', text)
    end
  end
  redis.call('DEL', flight)
  drop_other(jobs, id, job, lane)
end

local function acknowledge(jobs, ids, first, last)
  for i = first, last, 1000 do
    local upto = math.min(i + 999, last)
    redis.pcall('XACK', jobs, group, unpack(ids, i, upto))
    redis.pcall('XDEL', jobs, unpack(ids, i, upto))
  end
  acknowledged = acknowledged + last - first + 1
end

for s = 2, #KEYS do
  local jobs = KEYS[s]
  local last = math.min(at + tonumber(ARGV[at]), #ARGV)
  end_stored(jobs, at + 1, last)
  acknowledge(jobs, ARGV, at + 1, last)
  at = last + 1
  last = at + 4 * tonumber(ARGV[at])
  local ids = {}
  for i = at + 1, last, 4 do
    end_other(jobs, ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3])
    ids[#ids + 1] = ARGV[i + 1]
  end
  acknowledge(jobs, ids, 1, #ids)
  at = last + 1
end

local clients, notices = {}, {}
for _, waiting in ipairs(groups) do
  local text = table.concat(done[waiting])
  for client in each_of(waiting) do
    if not notices[client] then
      notices[client] = {}
      clients[#clients + 1] = client
    end
    table.insert(notices[client], text)
  end
end
local told = {}
for _, client in ipairs(clients) do
  local id = tell(prefix, client, 'ok', table.concat(notices[client]))
  if id then
    told[#told + 1] = client
    told[#told + 1] = id
  end
end

if stored == 0 then
  add_counters()
  return {acknowledged, 0}
end

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
add_counters()
return {acknowledged, held}
