-- Set a key only if it still holds what was read; with a second key, only if that does, too.
-- KEYS[1] key, KEYS[2] what living workers serve.
-- ARGV: what was read ('' for nothing, or for no string), what to write, the same two for the
--       second, its life in ms
if (given(redis.pcall('GET', KEYS[1])) or '') ~= ARGV[1] then return 0 end
if KEYS[2] then
  if (given(redis.pcall('GET', KEYS[2])) or '') ~= ARGV[3] then return 0 end
  redis.pcall('PEXPIRE', KEYS[2], ARGV[5]) -- lets the script write where the memory is full
  redis.call('SET', KEYS[2], ARGV[4], 'PX', ARGV[5])
end
redis.call('SET', KEYS[1], ARGV[2])
return 1
