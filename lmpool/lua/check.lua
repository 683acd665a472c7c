-- A client looks after what it waits for: one answer each, and leases renewed.
--   h  the result is there    j  it is still being computed    u  nobody knows of it
-- KEYS[1] a key of the shard. ARGV: prefix, client, reply TTL, flight TTL, digests
local prefix, client = ARGV[1], ARGV[2]
local reply = prefix .. ':reply:' .. client
local fresh = 0
if redis.call('PEXPIRE', reply, ARGV[3]) == 0 then
  redis.call('XADD', reply, '*', 'hello', '1')
  redis.call('PEXPIRE', reply, ARGV[3])
  fresh = 1
end
local answers = {}
for i = 5, #ARGV do
  local flight = prefix .. ':flight:' .. ARGV[i]
  local answer
  if redis.call('EXISTS', prefix .. ':result:' .. ARGV[i]) == 1 then
    answer = 'h'
  else
    local held = redis.call('HMGET', flight, 'job', 'stream')
    local job, stream = held[1], held[2]
    -- A flight whose job is gone from its stream will never land.
    if job and stream and #redis.call('XRANGE', stream, job, job) == 1 then
      redis.call('HSET', flight, 'c:' .. client, '')
      redis.call('PEXPIRE', flight, ARGV[4])
      answer = 'j'
    else
      if job then redis.call('DEL', flight) end
      answer = 'u'
    end
  end
  answers[#answers + 1] = answer
end
-- Ids that the client has read may lie beyond: a server that was restored is younger than they are.
local newest = ''
local found = redis.pcall('XINFO', 'STREAM', reply)
for f = 1, #found, 2 do
  if found[f] == 'last-generated-id' then newest = found[f + 1] end
end
return {table.concat(answers), fresh, newest}
