-- A client waits no longer for digests: a job that nobody else waits for is not run.
-- KEYS[1] a key of the shard. ARGV: prefix, client, digests
local prefix, waiter = ARGV[1], 'c:' .. ARGV[2]
local dropped = 0
for i = 3, #ARGV do
  local flight = prefix .. ':flight:' .. ARGV[i]
  -- What is left without a waiter: the fields 'job', 'stream' and 'deadline'.
  if redis.pcall('HDEL', flight, waiter) == 1 and redis.call('HLEN', flight) == 3 then
    local held = redis.call('HMGET', flight, 'job', 'stream')
    if held[1] and is_job_stream(prefix, held[2]) then redis.pcall('XDEL', held[2], held[1]) end
    redis.call('DEL', flight)
    dropped = dropped + 1
  end
end
return dropped
