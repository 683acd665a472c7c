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

for i = 3, last, 2 do
  local version, fingerprint = parts_of(ARGV[i + 1])
  local held, of = -1, ''
  local entry = redis.call('HGET', registry, ARGV[i])
  if entry then held, of = parts_of(entry) end
  if version > held or (version == held and fingerprint > of) then
    redis.call('HSET', registry, ARGV[i], ARGV[i + 1])
    changed = 1
  end
end
if changed == 1 then
  local forgotten = now_ms() - tonumber(ARGV[1])
  local all = redis.call('HGETALL', registry)
  for i = 1, #all, 2 do
    local version, fingerprint = parts_of(all[i + 1])
    if fingerprint == '' and version > 0 and version < forgotten then
      redis.call('HDEL', registry, all[i])
    end
  end
end
return changed
