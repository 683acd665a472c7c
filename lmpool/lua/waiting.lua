-- A worker looks which lanes have jobs that nobody has taken. The index of them is a hint: clients add to
-- it, and nobody takes off it what was read in the ordinary way. So what looks as if it had waited long
-- enough is looked at.
-- KEYS[1] index of waiting lanes, KEYS[2] stream where idle workers are called.
-- ARGV: prefix, group, consumer, ms after which waiting jobs are anyone's, what it does about the calls
--       that it follows, lanes, then these calls. It does 'on': goes on following them, if it finds
--       nothing to take; 'end': ends them if nothing waits; 'pass': has another follow them; 'list': it only
--       asks, of its own lanes
-- Returns {ms until more lanes are anyone's, or -1 where none waits, then for each that is: its name, for
-- how many ms its first job has waited, jobs that nobody has}.
local index, wake, prefix, group, me = KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3]
local patience, does, lanes = tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])
local now = now_ms()

-- The time of the first entry that nobody was given, and how many there are, or nothing.
local function look_at(stream)
  local found = group_of(stream, group)
  if not found then return nil end
  local first = given(redis.pcall('XRANGE', stream, '(' .. found['last-delivered-id'], '+', 'COUNT', 1))
  if not first or not first[1] then return nil end
  local count = redis.call('XLEN', stream) - found['pending']
  return tonumber(string.match(first[1][1], '^%d+')), math.max(1, count)
end

local soonest = -1
local ripe = {}
local indexed = given(redis.pcall('ZRANGE', index, 0, 2 * lanes, 'WITHSCORES'))
if not indexed or #indexed > 4 * lanes then
  redis.call('DEL', index) -- no client of ours wrote this
  indexed = {}
end
for i = 1, #indexed, 2 do
  local name = indexed[i]
  local stream = stream_of(prefix, name, lanes) -- it may have had more
  local since, jobs = tonumber(indexed[i + 1]), nil
  if not stream then
    since = nil
  elseif now - since >= patience or since > now then
    local said = since
    since, jobs = look_at(stream)
    -- What is dated in the future waits since the first look: the clock was set back, or somebody wrote it.
    if since and since > now then since = math.min(said, now) end
    if since and (now - since < patience or said > now) then redis.call('ZADD', index, since, name) end
  end
  if not since then
    redis.call('ZREM', index, name)
  elseif jobs and now - since >= patience then
    ripe[#ripe + 1] = name
    ripe[#ripe + 1] = now - since
    ripe[#ripe + 1] = jobs
  else
    local left = math.max(0, math.min(patience, patience - now + since))
    if soonest < 0 or left < soonest then soonest = left end
  end
end

-- Who takes jobs is idle no more, and so is who only passes the call on: then another is to look.
if does ~= 'list' and (#ripe > 0 or does == 'pass' or (does == 'end' and soonest < 0)) then
  for i = 7, #ARGV do take_off(wake, group, ARGV[i]) end
  redis.pcall('XTRIM', wake, 'MINID', now - 1000) -- calls that a worker died with
  if #ripe > 0 or soonest >= 0 then call_idle(prefix, '1') end
end
return {soonest, unpack(ripe)}
