-- A client waits no longer for digests: a job that nobody else waits for is not run.
-- KEYS[1] job stream. ARGV: prefix, client, digests
local jobs, prefix, waiter = KEYS[1], ARGV[1], 'c:' .. ARGV[2]
local dropped = 0
for i = 3, #ARGV do
  local flight = prefix .. ':flight:' .. ARGV[i]
  -- What is left without a waiter: the fields 'job' and 'deadline'.
  if redis.call('HDEL', flight, waiter) == 1 and redis.call('HLEN', flight) == 2 then
    redis.call('XDEL', jobs, redis.call('HGET', flight, 'job'))
    redis.call('DEL', flight)
    dropped = dropped + 1
  end
end
return dropped
