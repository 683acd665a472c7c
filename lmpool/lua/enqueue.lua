-- Claim digests for a client: one answer each, all at once.
--   h  a result is there          j  another asked already: wait with it
--   q  the job is queued          f  the backlog is at its bound: nothing was done
--   a  the adapter is not the registered one any more
-- A job that waits in the other stream comes into this one if `promote` is 1 and nobody has it yet.
-- KEYS[1] job stream. The other keys are derived from the shard's prefix: they share its slot.
-- ARGV: prefix, client, reply TTL, flight TTL, backlog bound, group, promote, then per job:
--       digest, deadline or '', adapter or '', job
local jobs, prefix, client = KEYS[1], ARGV[1], ARGV[2]
local reply_ttl, flight_ttl, bound = ARGV[3], ARGV[4], tonumber(ARGV[5])
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

local backlog = redis.call('XLEN', jobs)
local answers = {}
for i = 8, #ARGV, 4 do
  local digest, deadline, adapter = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local flight = prefix .. ':flight:' .. digest
  local answer
  local known = true
  if adapter ~= '' then
    local name, fingerprint = string.match(adapter, '^(.*)@([^@]*)$')
    local entry = name and redis.call('HGET', prefix .. ':adapters', name)
    known = entry and string.sub(entry, 1, #fingerprint + 1) == fingerprint .. '\n'
  end
  if not known then
    answer = 'a'
  elseif redis.call('EXISTS', prefix .. ':result:' .. digest) == 1 then
    answer = 'h'
  else
    local due = redis.call('HGET', flight, 'deadline')
    if due then
      -- The job runs for whoever waits longest.
      if due ~= '' and (deadline == '' or tonumber(deadline) > tonumber(due)) then
        redis.call('HSET', flight, waiter, '', 'deadline', deadline)
      else
        redis.call('HSET', flight, waiter, '')
      end
      redis.call('PEXPIRE', flight, flight_ttl)
      if promote then
        local held = redis.call('HMGET', flight, 'job', 'stream')
        if held[2] and held[2] ~= jobs and redis.call('EXISTS', held[2]) == 1
            and #redis.pcall('XPENDING', held[2], group, held[1], held[1], 1) == 0
            and redis.call('XDEL', held[2], held[1]) == 1 then
          local id = redis.call('XADD', jobs, '*', 'job', ARGV[i + 3])
          redis.call('HSET', flight, 'job', id, 'stream', jobs)
        end
      end
      answer = 'j'
    elseif backlog >= bound then
      answer = 'f'
    else
      local id = redis.call('XADD', jobs, '*', 'job', ARGV[i + 3])
      redis.call('HSET', flight, 'job', id, 'stream', jobs, 'deadline', deadline, waiter, '')
      redis.call('PEXPIRE', flight, flight_ttl)
      backlog = backlog + 1
      answer = 'q'
    end
  end
  answers[#answers + 1] = answer
end
return {table.concat(answers), fresh}
