-- What was done last with names of adapters comes into a shard's registry: of each name the newest stands.
-- KEYS[1] registry; where the pool comes into the shard KEYS[2] bounds, KEYS[3] the shard's workers.
-- ARGV: how long removals are known, in ms, number of names, then name and entry of each (lmpool.registry);
--       where the pool comes: name of the layout, or '' of one without: then, of what was here before, with
--       nobody left of it, the name is forgotten,
--       '1' if the registry here is that of another time, life of the bounds
-- Returns 1 if anything was changed.
local registry, bounds, workers = KEYS[1], KEYS[2], KEYS[3]
local last = math.min(2 + 2 * tonumber(ARGV[2]), #ARGV) -- whoever calls it: it comes to its end
local layout, changed = ARGV[last + 1], 0

-- Its version, and the fingerprint: none of what was removed.
local function parts_of(entry)
  local fingerprint, version = string.match(entry, '^([^\n]*)\n(%d+)\n')
  if not version or #version > 15 then return 0, string.match(entry, '^[^\n]*') end
  return tonumber(version), fingerprint
end

if bounds then
  local is_served = (given(redis.pcall('ZCOUNT', workers, now_ms(), '+inf')) or 0) > 0
  for _, key in ipairs({registry, bounds}) do
    if not given(redis.pcall('HLEN', key)) then -- of another type
      if key == registry and is_served then return 0 end -- who mends it has it brought
      redis.call('DEL', key)
    end
  end
  if layout == '' then
    if not is_served then redis.call('HDEL', bounds, 'layout', 'heir') end
  elseif redis.call('HGET', bounds, 'layout') ~= layout then
    if ARGV[last + 2] == '1' then redis.call('DEL', registry) end
    redis.call('PERSIST', registry) -- the pool may be back
    redis.call('HDEL', bounds, 'heir')
    redis.call('HSET', bounds, 'layout', layout)
    redis.call('PEXPIRE', bounds, ARGV[last + 3])
    changed = 1
  end
end

local held, live, lived = {}, 0, 0
local all = redis.call('HGETALL', registry)
for i = 1, #all, 2 do held[all[i]] = all[i + 1] end
local function is_removed(entry)
  local version, fingerprint = parts_of(entry)
  return fingerprint == '' and version > 0, version
end
for _, entry in pairs(held) do
  if not is_removed(entry) then lived = lived + 1 end
end
for i = 3, last, 2 do
  local name, entry = ARGV[i], ARGV[i + 1]
  local version, fingerprint = parts_of(entry)
  local before, of = -1, ''
  if held[name] then before, of = parts_of(held[name]) end
  if version > before or (version == before and fingerprint > of) then
    redis.call('HSET', registry, name, entry)
    held[name], changed = entry, 1
  end
end
if changed == 1 then
  local forgotten = now_ms() - tonumber(ARGV[1])
  for name, entry in pairs(held) do
    local removed, version = is_removed(entry)
    if not removed then live = live + 1
    elseif version < forgotten then redis.call('HDEL', registry, name) end
  end
  -- A shard that is left has its own ends; who registers there first has yet to leave it.
  if live == 0 then redis.call('PEXPIRE', registry, ARGV[1])
  elseif lived == 0 then redis.call('PERSIST', registry) end
end
return changed
