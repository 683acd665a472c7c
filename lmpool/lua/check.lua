-- A client looks after what it waits for: one answer each, and leases renewed.
--   h  the result is there    j  it is still being computed    u  nobody knows of it
-- KEYS[1] a key of the shard. ARGV: prefix, client, reply TTL, flight TTL, digests
local prefix, client = ARGV[1], ARGV[2]
local reply = prefix .. ':reply:' .. client
local fresh = 0
if not takes_entries(reply) then redis.call('DEL', reply) end
if redis.call('PEXPIRE', reply, ARGV[3]) == 0 then
  redis.call('XADD', reply, '*', 'hello', '1')
  redis.call('PEXPIRE', reply, ARGV[3])
  fresh = 1
end
local bounds = given(redis.pcall('HMGET', prefix .. ':bounds', 'lanes')) or {}
local lanes = tonumber(bounds[1])
local answers = {}
for i = 5, #ARGV do
  local flight = prefix .. ':flight:' .. ARGV[i]
  local answer
  if has_result(prefix, ARGV[i]) then
    answer = 'h'
  else
    local job, lane, due, waiting = read_flight(flight)
    local stream = job and stream_of(prefix, lane, lanes)
    -- A flight whose job is gone from its stream will never land.
    local entry = stream and given(redis.pcall('XRANGE', stream, job, job, 'COUNT', 1))
    if entry and #entry == 1 then
      local noted = with_client(waiting, client)
      if noted == waiting then
        redis.call('PEXPIRE', flight, ARGV[4])
      else
        redis.call('SET', flight, flight_of(job, lane, due, noted), 'PX', ARGV[4])
      end
      answer = 'j'
    else
      redis.call('DEL', flight)
      answer = 'u'
    end
  end
  answers[#answers + 1] = answer
end
-- Ids that the client has read may lie beyond: a server that was restored is younger than they are.
local newest = ''
local found = given(redis.pcall('XINFO', 'STREAM', reply)) or {}
for f = 1, #found, 2 do
  if found[f] == 'last-generated-id' then newest = found[f + 1] end
end
return {table.concat(answers), fresh, newest}
