-- A shard has fewer lanes than it had: what it has no more ends. Who waits for a job there asks again, as
-- check.lua knows nothing of it.
-- KEYS[1] bounds, the others streams of jobs, or where idle workers were called.
-- ARGV: their life in ms, '1' if their jobs go now
local lanes = tonumber(given(redis.pcall('HGET', KEYS[1], 'lanes')) or '')
for i = 2, #KEYS do
  local lane = tonumber(string.match(KEYS[i], ':(%d+)$') or '1') -- one lane needs no calls
  if lanes and lane >= lanes then
    if ARGV[2] == '1' then redis.pcall('XTRIM', KEYS[i], 'MAXLEN', 0) end
    redis.pcall('PEXPIRE', KEYS[i], ARGV[1], 'LT')
  end
end
return 1
