-- A worker leaves: its heartbeat ends, and its consumer too unless it still holds entries
-- (deleting a consumer drops what it holds).
-- KEYS[1] job stream, KEYS[2] heartbeat. ARGV: group, consumer
redis.call('DEL', KEYS[2])
local held = given(redis.pcall('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]))
if held and #held == 0 then
  redis.pcall('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
  return 1
end
return 0
