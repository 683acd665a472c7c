-- A living worker says what the pool serves, and publishes the model info again where it was lost.
-- One whose pool was taken over says nothing, changes nothing of what the others say, and publishes it only
-- where these have had their turn.
-- Returns 0 where the pool was, 3 where nothing is there and others have theirs, 2 where the model info is
-- another than this worker's all the same, else 1.
-- KEYS[1] model info, KEYS[2] what living workers serve.
-- ARGV: model info, what this one serves, life, 1 where it may be the first to say so
local held = given(redis.pcall('GET', KEYS[1]))
if not held then
  if ARGV[4] ~= '1' then return 3 end
elseif held ~= ARGV[1] and given(redis.pcall('GET', KEYS[2])) ~= ARGV[2] then
  return 0
end
redis.call('PEXPIRE', KEYS[2], ARGV[3]) -- lets the script write where the memory is full
if not held then redis.call('SET', KEYS[1], ARGV[1]) end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return held and held ~= ARGV[1] and 2 or 1
