-- A worker's sign of life. Its consumer is made again if others removed it as a dead one's.
-- KEYS[1] job stream, KEYS[2] heartbeat, KEYS[3] since when the shard has had beats without a gap,
-- KEYS[4] the shard's workers: each until when it lives, in ms, and under '' the number of the last time
--       that one of them came or went, below zero. It begins with the clock: none comes again once all of
--       this was lost.
-- KEYS[5] bounds.
-- ARGV: group, consumer, what the heartbeat holds, its life, the longest gap between two beats, the
--       change of workers that is known, lanes, lanes for each worker, life of the bounds
-- Returns the number of the last change, how many lanes are in use and, if it is another change, the
-- workers.
-- A full memory must not look like a death. Redis lets a script go on that has begun to write, and
-- this write takes no memory.
redis.call('PEXPIRE', KEYS[2], ARGV[4])
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
local now = now_ms()
if not steady_since(KEYS[3]) then redis.call('SET', KEYS[3], string.format('%.0f', now)) end
redis.call('PEXPIRE', KEYS[3], ARGV[5])
redis.pcall('XGROUP', 'CREATECONSUMER', KEYS[1], ARGV[1], ARGV[2]) -- there may be no group yet

local workers = KEYS[4]
local function change()
  local ended = redis.call('ZREMRANGEBYSCORE', workers, 0, now)
  -- Who is to live for longer than a life said so before the clock was set back, or never did.
  local latest = string.format('%.0f', now + ARGV[4])
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', workers, '(' .. latest, '+inf', 'LIMIT', 0, 5000)) do
    redis.call('ZADD', workers, latest, name)
  end
  local joined = redis.call('ZADD', workers, latest, ARGV[2])
  redis.call('ZADD', workers, 'NX', string.format('%.0f', -now), '')
  if ended + joined > 0 then redis.call('ZINCRBY', workers, -1, '') end
  redis.call('PEXPIRE', workers, 2 * ARGV[4])
  return redis.call('ZSCORE', workers, '')
end
if redis.call('TYPE', workers)['ok'] ~= 'zset' then redis.call('DEL', workers) end
local last = change()
-- As lmpool.affinity.lanes_in_use.
local used, count = 1, redis.call('ZCARD', workers) - 1
while count > 1 and used < ARGV[8] * count do used = 2 * used end
used = math.min(used, tonumber(ARGV[7]))
redis.pcall('HSET', KEYS[5], 'used', used)
redis.pcall('PEXPIRE', KEYS[5], ARGV[9], 'NX') -- mend.lua may never come to it
if last == ARGV[6] then return {last, used} end
return {last, used, unpack(redis.call('ZRANGEBYSCORE', workers, 0, '+inf', 'LIMIT', 0, 5000))}
