-- A shard takes over what one had that the pool has left: each thing once, whoever brings it, and however
-- often.
-- KEYS[1] what was taken over, KEYS[2] counters, KEYS[3] stream of the dead.
-- ARGV: how long that is remembered, life of the counters, most dead kept,
--       name of the counters or '', number of counters, then name and increment of each,
--       then per dead letter: its name, number of its fields, then field and value of each
local taken, counters, dead = KEYS[1], KEYS[2], KEYS[3]

local function is_new(name)
  if redis.call('TYPE', taken)['ok'] ~= 'set' then redis.call('DEL', taken) end
  return redis.call('SADD', taken, name) == 1
end

local count = ARGV[4] ~= '' and is_new(ARGV[4])
local last = math.min(5 + 2 * tonumber(ARGV[5]), #ARGV) -- whoever calls it: it comes to its end
if count then
  for i = 6, last, 2 do redis.pcall('HINCRBY', counters, ARGV[i], ARGV[i + 1]) end
  redis.pcall('PEXPIRE', counters, ARGV[2])
end
local at = last + 1
while at <= #ARGV do
  last = at + 1 + 2 * tonumber(ARGV[at + 1])
  if is_new(ARGV[at]) then
    local kept = redis.pcall('XADD', dead, 'MAXLEN', '~', ARGV[3], '*', unpack(ARGV, at + 2, last))
    if type(kept) == 'table' and kept['err'] then redis.call('SREM', taken, ARGV[at]) end
    given(kept)
  end
  at = last + 1
end
redis.call('PEXPIRE', taken, ARGV[1])
return 1
