-- A shard takes over what one had that the pool has left: each thing once, whoever brings it, and however
-- often.
-- KEYS[1] what was taken over, KEYS[2] counters, KEYS[3] stream of the dead, KEYS[4] registry of adapters,
-- KEYS[5] bounds.
-- ARGV: how long that is remembered, life of the counters, most dead kept, which move of the pool it is,
--       or -1 where no adapters are brought, number of adapters, then name and entry of each,
--       name of the counters or '', number of counters, then name and increment of each,
--       then per dead letter: its name, number of its fields, then field and value of each
-- Returns 1 if this is the first that brings adapters.
local taken, counters, dead, adapters, bounds = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local at = 6
local last = 5 + 2 * tonumber(ARGV[5])
local first = 0
-- What was there may be of a time when the pool was here before.
local known = given(redis.pcall('HGET', bounds, 'moves'))
if tonumber(ARGV[4]) > 0 and known ~= ARGV[4]
    or ARGV[4] == '0' and redis.call('EXISTS', adapters) == 0 then
  first = 1
  redis.call('DEL', adapters)
  for i = at, last, 2 do redis.call('HSET', adapters, ARGV[i], ARGV[i + 1]) end
  redis.pcall('HSET', bounds, 'moves', ARGV[4])
end
at = last + 1

local function is_new(name)
  if redis.call('TYPE', taken)['ok'] ~= 'set' then redis.call('DEL', taken) end
  return redis.call('SADD', taken, name) == 1
end

local count = ARGV[at] ~= '' and is_new(ARGV[at])
last = at + 1 + 2 * tonumber(ARGV[at + 1])
if count then
  for i = at + 2, last, 2 do redis.pcall('HINCRBY', counters, ARGV[i], ARGV[i + 1]) end
  redis.pcall('PEXPIRE', counters, ARGV[2])
end
at = last + 1
while at <= #ARGV do
  last = at + 1 + 2 * tonumber(ARGV[at + 1])
  if is_new(ARGV[at]) then
    redis.pcall('XADD', dead, 'MAXLEN', '~', ARGV[3], '*', unpack(ARGV, at + 2, last))
  end
  at = last + 1
end
redis.call('PEXPIRE', taken, ARGV[1])
return first
