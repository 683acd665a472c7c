-- A shard that the pool has left, or is leaving: what its workers counted is set aside, to be counted
-- elsewhere. Once it serves nobody its keys end; then, if they are to be emptied, its jobs go: whoever
-- waits for one asks elsewhere.
-- KEYS[1] what was set aside, KEYS[2] counters, KEYS[3] the shard's workers, the others what lasts.
-- ARGV: which was counted elsewhere ('' for none), a name for what is set aside now, the life of keys in
--       ms, how many of the others are streams of jobs to be emptied
-- Returns fields and values of what is set aside, its name under ''.
local parted, counters = KEYS[1], KEYS[2]
if ARGV[1] ~= '' and given(redis.pcall('HGET', parted, '')) == ARGV[1] then redis.call('DEL', parted) end
if redis.call('EXISTS', parted) == 0 and (given(redis.pcall('HLEN', counters)) or 0) > 0 then
  redis.call('RENAME', counters, parted)
  redis.call('HSET', parted, '', ARGV[2])
  redis.call('PEXPIRE', parted, ARGV[3])
end
if (given(redis.pcall('ZCOUNT', KEYS[3], now_ms(), '+inf')) or 0) == 0 then
  for i = 4, #KEYS do
    if i - 3 <= tonumber(ARGV[4]) then redis.pcall('XTRIM', KEYS[i], 'MAXLEN', 0) end
    redis.call('PEXPIRE', KEYS[i], ARGV[3])
  end
end
return given(redis.pcall('HGETALL', parted)) or {}
