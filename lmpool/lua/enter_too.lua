-- A shard comes into a layout that others of the pool are in: it has the registry of adapters as they have
-- it, and knows what was brought to them. What it had is of a time before, or is theirs.
-- KEYS[1] registry, KEYS[2] what was brought last, KEYS[3] bounds.
-- ARGV: name of the layout, life of the bounds, how long what was brought is known, number of adapters, then
--       name and entry of each, and the same of what was brought
-- Returns 1 if it was not there yet.
local registry, brought, bounds, layout = KEYS[1], KEYS[2], KEYS[3], ARGV[1]
if given(redis.pcall('HGET', bounds, 'layout')) == layout then return 0 end
redis.call('DEL', registry, brought)
if not given(redis.pcall('HLEN', bounds)) then redis.call('DEL', bounds) end
local last = 4 + 2 * tonumber(ARGV[4])
for i = 5, last, 2 do redis.call('HSET', registry, ARGV[i], ARGV[i + 1]) end
for i = last + 2, #ARGV - 1, 2 do redis.call('HSET', brought, ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', brought, ARGV[3])
redis.call('HDEL', bounds, 'heir')
redis.call('HSET', bounds, 'layout', layout)
redis.call('PEXPIRE', bounds, ARGV[2])
return 1
