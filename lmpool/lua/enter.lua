-- A pool comes into a shard: the registry of adapters comes along, once for each layout, and later what
-- workers that came after changed where it was. What was changed here meanwhile stands.
-- KEYS[1] registry, KEYS[2] what was brought last, KEYS[3] bounds, KEYS[4] the shard's workers.
-- ARGV: name of the layout, or '' of one without: then it is brought where there is none, and of what
--       was here before, with nobody left of it, the name is forgotten,
--       '1' if a registry is brought, '0' if the one that is here is right, how long what was brought is
--       known once the pool has come, life of the bounds, then name and entry of each adapter
-- Returns 1 if anything was changed.
local registry, brought, bounds, layout = KEYS[1], KEYS[2], KEYS[3], ARGV[1]
local function entries_of(values, from)
  local found = {}
  for i = from, #values, 2 do found[values[i]] = values[i + 1] end
  return found
end
local is_served = (given(redis.pcall('ZCOUNT', KEYS[4], now_ms(), '+inf')) or 0) > 0
for _, key in ipairs({registry, brought, bounds}) do
  if not given(redis.pcall('HLEN', key)) then -- of another type
    if key == registry and is_served then return 0 end -- who mends it knows what was there
    redis.call('DEL', key)
  end
end
local function held_in(key) return entries_of(given(redis.pcall('HGETALL', key)) or {}, 1) end

local now, before, known_for = entries_of(ARGV, 5), {}, ARGV[3]
local name = redis.call('HGET', bounds, 'layout')
if layout == '' then
  if not is_served then redis.call('HDEL', bounds, 'layout', 'heir') end
  if ARGV[2] == '0' or redis.call('EXISTS', registry) == 1 then return 0 end
elseif name ~= layout then
  if ARGV[2] == '0' then
    now = held_in(registry)
    before = now
  elseif not name and is_served and redis.call('HEXISTS', bounds, 'heir') == 0
      and redis.call('EXISTS', registry, brought) > 0 then
    -- Only the name was lost: no adapters are a registry, too. Or it came late, and some are new.
    for name in pairs(held_in(registry)) do before[name] = now[name] end
    if redis.call('EXISTS', brought) == 1 then
      before = held_in(brought)
      before[''] = nil
      known_for = redis.call('PTTL', brought)
    end
  else
    redis.call('DEL', registry) -- of a time when the pool was here before
  end
  redis.call('HDEL', bounds, 'heir')
  redis.call('HSET', bounds, 'layout', layout)
  redis.call('PEXPIRE', bounds, ARGV[4])
elseif ARGV[2] == '1' and redis.call('EXISTS', brought) == 1 then
  before = held_in(brought)
  before[''] = nil
  -- Who comes later does not prolong it: where it came from ends.
  known_for = redis.call('PTTL', brought)
else
  return 0
end

local changed = 0
for name, entry in pairs(now) do
  if before[name] ~= entry then changed = changed + redis.call('HSET', registry, name, entry) + 1 end
end
for name in pairs(before) do
  if not now[name] then changed = changed + redis.call('HDEL', registry, name) end
end
redis.call('DEL', brought)
redis.call('HSET', brought, '', '') -- also where there are none
for name, entry in pairs(now) do redis.call('HSET', brought, name, entry) end
redis.call('PEXPIRE', brought, known_for)
return changed > 0 and 1 or 0
