-- A worker looks after the jobs of workers that have no heartbeat: it takes over one of them, and
-- consumers that hold nothing are removed (deleting one that holds entries would drop them).
-- Owner and heartbeat are looked at in the same step as the claim: a living worker loses nothing.
-- Nobody is dead until beats have come without a gap for a heartbeat's life: while the server was away
-- nobody could renew, and what it lost since may have been a heartbeat.
-- Only a death counts: what a worker forgot itself keeps its number of deliveries.
-- A heartbeat that ends later than its life from now was set before the clock was set back, and one that
-- never ends was brought back by what restores keys without their lives: it gets one life, within which a
-- living worker renews it.
-- KEYS[1] since when the shard has had beats without a gap, the others streams.
-- ARGV: prefix, group, who asks, a heartbeat's life, then for each stream how many entries of its own it
--       has forgotten, and their ids
-- Returns {place of the stream, owner, id, deliveries, field, value...} or nothing. Of what is too large
-- for a job it gives the bytes alone, in place of the fields.
local prefix, group, me, life = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])

local function claim(s, owner, id, deliveries)
  local jobs = KEYS[s]
  local entries = redis.call('XCLAIM', jobs, group, me, 0, id, 'RETRYCOUNT', deliveries)
  if not entries[1] then
    redis.call('XACK', jobs, group, id) -- it was withdrawn
    return nil
  end
  local answer, fields = {s - 2, owner, id, deliveries}, entries[1][2]
  local size = size_of(fields)
  if size > MAX_JOB_BYTES then fields = {'bytes', tostring(size)} end
  for _, value in ipairs(fields) do answer[#answer + 1] = value end
  return answer
end

local function alive(name)
  local key = prefix .. ':alive:' .. name
  local left = redis.call('PTTL', key)
  if left > life or left == -1 then redis.call('PEXPIRE', key, life) end
  return left ~= -2
end

local at = 5
for s = 2, #KEYS do
  local last = math.min(at + tonumber(ARGV[at]), #ARGV) -- whoever calls it: it comes to its end
  for i = at + 1, last do
    local held = given(redis.pcall('XPENDING', KEYS[s], group, ARGV[i], ARGV[i], 1, me))
    held = held and held[1]
    local answer = held and claim(s, me, held[1], held[4])
    if answer then return answer end
  end
  at = last + 1
end

local since = steady_since(KEYS[1])
if not since or now_ms() - since < life then return nil end

local dead = {} -- by name, as far as they were looked at
local function is_dead(name)
  if dead[name] == nil then dead[name] = name ~= me and not alive(name) end
  return dead[name]
end

for s = 2, #KEYS do
  local jobs = KEYS[s]
  -- No stream or no group: nobody holds anything.
  for _, consumer in ipairs(given(redis.pcall('XINFO', 'CONSUMERS', jobs, group)) or {}) do
    local name, pending
    for f = 1, #consumer, 2 do
      if consumer[f] == 'name' then name = consumer[f + 1] end
      if consumer[f] == 'pending' then pending = tonumber(consumer[f + 1]) end
    end
    if is_dead(name) then
      if not lane_of(jobs) then pending = 0 end -- a call to look is nobody's loss
      while pending > 0 do
        local held = redis.call('XPENDING', jobs, group, '-', '+', 1, name)[1]
        if not held then break end
        local answer = claim(s, name, held[1], held[4] + 1)
        if answer then return answer end
        pending = pending - 1
      end
      redis.call('XGROUP', 'DELCONSUMER', jobs, group, name)
    end
  end
end
return nil
