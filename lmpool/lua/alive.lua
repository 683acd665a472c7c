-- A worker's sign of life. Its consumer is made again if others removed it as a dead one's.
-- KEYS[1] job stream, KEYS[2] heartbeat, KEYS[3] since when the shard has had beats without a gap.
-- ARGV: group, consumer, what the heartbeat holds, its life, the longest gap between two beats
-- A full memory must not look like a death. Redis lets a script go on that has begun to write, and
-- this write takes no memory.
redis.call('PEXPIRE', KEYS[2], ARGV[4])
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
if not steady_since(KEYS[3]) then redis.call('SET', KEYS[3], string.format('%.0f', now_ms())) end
redis.call('PEXPIRE', KEYS[3], ARGV[5])
redis.pcall('XGROUP', 'CREATECONSUMER', KEYS[1], ARGV[1], ARGV[2]) -- there may be no group yet
return 1
