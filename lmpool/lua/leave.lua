-- A worker leaves: its heartbeat ends, and its consumers too unless one still holds entries
-- (deleting a consumer drops what it holds: a call to look at waiting lanes is nobody's loss).
-- KEYS[1] heartbeat, KEYS[2] the shard's workers, the others streams. ARGV: group, consumer
-- Returns how many of its consumers are gone.
local group, me = ARGV[1], ARGV[2]
redis.call('DEL', KEYS[1])
if redis.pcall('ZREM', KEYS[2], me) == 1 then redis.call('ZINCRBY', KEYS[2], -1, '') end
local gone = 0
for s = 3, #KEYS do
  local held = given(redis.pcall('XPENDING', KEYS[s], group, '-', '+', 1, me))
  if held and string.match(KEYS[s], ':wake$') then held = {} end
  if held and #held == 0 then
    redis.pcall('XGROUP', 'DELCONSUMER', KEYS[s], group, me)
    gone = gone + 1
  end
end
return gone
