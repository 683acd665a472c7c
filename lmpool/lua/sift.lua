-- A worker has entries that are too long to be read: those that no job can be are taken off, and a
-- word of each is kept among the dead. Nobody can be told: they were never looked into.
-- KEYS[1] job stream, KEYS[2] stream of the dead.
-- ARGV: prefix, group, consumer, the last entry that it knows, counter TTL, most dead kept
-- Returns how many were taken off, and the last entry that was looked at, or '' after the last one.
local jobs, dead, prefix, group, me = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]
local taken, looked, last = 0, 0, ''
-- Redis lets a script go on that has begun to write, also where the memory is full.
redis.pcall('PEXPIRE', prefix .. ':counters', ARGV[5])
see_that_it_comes_off(jobs, group)
local held = redis.call('XPENDING', jobs, group, '(' .. ARGV[4], '+', 100, me)
for place, item in ipairs(held) do
  local id = item[1]
  local entry = redis.call('XRANGE', jobs, id, id)[1]
  local size = entry and size_of(entry[2]) or 0
  if size > MAX_JOB_BYTES then
    local reason = 'an entry of ' .. size .. ' bytes: at most ' .. MAX_JOB_BYTES .. ' are read'
    given(redis.pcall('XADD', dead, 'MAXLEN', '~', ARGV[6], '*', 'job', '', 'reason', reason,
      'deliveries', '0', 'worker', me))
    take_off(jobs, group, id)
    redis.pcall('HINCRBY', prefix .. ':counters', 'failed', 1)
    redis.pcall('PEXPIRE', prefix .. ':counters', ARGV[5])
    taken = taken + 1
  end
  looked = looked + size
  -- Each was copied: not too many before the server clears them away.
  if place == 100 or looked > 4 * MAX_JOB_BYTES then
    last = id
    break
  end
end
return {taken, last}
