-- Set a key only if it still holds what was read.
-- KEYS[1] key. ARGV: what was read ('' for nothing), what to write
local held = redis.call('GET', KEYS[1]) or ''
if held ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
