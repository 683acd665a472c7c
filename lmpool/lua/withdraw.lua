-- A client waits no longer for digests: a job that nobody else waits for is not run.
-- KEYS[1] a key of the shard. ARGV: prefix, client, digests
local prefix, waiter = ARGV[1], ' ' .. ARGV[2] .. ' '
local dropped = 0
-- Redis lets a script go on that has begun to write, also where the memory is full.
redis.pcall('DEL', prefix .. ':flight:')
for i = 3, #ARGV do
  local flight = prefix .. ':flight:' .. ARGV[i]
  local job, lane, deadline, waiting = read_flight(flight)
  local from, to = string.find(waiting or '', waiter, 1, true)
  if from then
    waiting = string.sub(waiting, 1, from) .. string.sub(waiting, to + 1)
    if waiting ~= ' ' then
      redis.call('SET', flight, flight_of(job, lane, deadline, waiting), 'KEEPTTL')
    else
      local stream = stream_of(prefix, lane)
      if stream then redis.pcall('XDEL', stream, job) end
      redis.call('DEL', flight)
      dropped = dropped + 1
    end
  end
end
return dropped
