-- A shard takes over what one had that the pool has left: each thing once, whoever brings it, and however
-- often. Where one is refused the script ends: whoever brings it still has it.
-- KEYS[1] what was taken over, KEYS[2] counters, KEYS[3] stream of the dead.
-- ARGV: how long that is remembered, life of the counters, most dead kept,
--       name of the counters or '', number of counters, then name and increment of each,
--       then per dead letter: its name, number of its fields, then field and value of each
local taken, counters, dead = KEYS[1], KEYS[2], KEYS[3]

-- Each thing is noted once it is taken over. That it can be is seen before, by a name that nothing has:
-- where this is refused, as where the memory is full, nothing was done.
local held = redis.call('TYPE', taken)['ok']
if held ~= 'set' and held ~= 'none' then redis.call('DEL', taken) end
redis.call('SADD', taken, '')
redis.call('PEXPIRE', taken, ARGV[1])

local function is_new(name)
  return redis.call('SISMEMBER', taken, name) == 0
end

-- What no counters can be is taken away, as mend.lua does: they would be lost with it.
if not given(redis.pcall('HLEN', counters)) then redis.call('DEL', counters) end
local function add(name, increment)
  if not is_count(increment) then return end
  if not given(redis.pcall('HINCRBY', counters, name, increment)) then
    redis.call('HDEL', counters, name)
    redis.call('HINCRBY', counters, name, increment)
  end
end

local last = math.min(5 + 2 * tonumber(ARGV[5]), #ARGV) -- whoever calls it: it comes to its end
if ARGV[4] ~= '' and is_new(ARGV[4]) then
  for i = 6, last, 2 do add(ARGV[i], ARGV[i + 1]) end
  redis.call('SADD', taken, ARGV[4])
  redis.pcall('PEXPIRE', counters, ARGV[2])
end
local at = last + 1
while at <= #ARGV do
  last = at + 1 + 2 * tonumber(ARGV[at + 1])
  if is_new(ARGV[at]) then
    redis.call('XADD', dead, 'MAXLEN', '~', ARGV[3], '*', unpack(ARGV, at + 2, last))
    redis.call('SADD', taken, ARGV[at])
  end
  at = last + 1
end
return 1
