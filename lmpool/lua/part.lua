-- A shard that the pool has left, or is leaving: what its workers counted is set aside, to be counted
-- elsewhere, by the same heir whoever brings it. Once it serves nobody its keys end; then, if they are to
-- be emptied, its jobs go: whoever waits for one asks elsewhere. Of one that the pool came back to, as who
-- asks may have yet to see, nothing is touched; what was set aside in it goes to the heir that it had then.
-- KEYS[1] what was set aside, KEYS[2] counters, KEYS[3] the shard's workers, KEYS[4] bounds, the others
-- what lasts.
-- ARGV: which was counted elsewhere ('' for none), a name for what is set aside now, the life of keys in
--       ms, how many of the others are streams of jobs to be emptied, the heir's prefix if it has none yet,
--       then the names of the layouts that the pool has left
-- Returns 1 if anybody is served there, else 0, or 2 of a shard that was not left; the heir's prefix, then
-- fields and values of what is set aside, its name under ''. Nothing where nothing is, of one not left.
local parted, counters, bounds, life = KEYS[1], KEYS[2], KEYS[4], ARGV[3]
local HEIR = ' heir' -- a field of what is set aside that is no counter
local function set_aside()
  local found = {}
  local held = given(redis.pcall('HGETALL', parted)) or {}
  for f = 1, #held, 2 do
    if held[f] ~= HEIR then
      found[#found + 1] = held[f]
      found[#found + 1] = held[f + 1]
    end
  end
  return unpack(found)
end
if ARGV[1] ~= '' and given(redis.pcall('HGET', parted, '')) == ARGV[1] then redis.call('DEL', parted) end
local layout, was_left = given(redis.pcall('HGET', bounds, 'layout')) or '', false
for i = 6, #ARGV do was_left = was_left or ARGV[i] == layout end
if not was_left then
  if not given(redis.pcall('HGET', parted, '')) then return {} end
  return {2, redis.call('HGET', parted, HEIR) or ARGV[5], set_aside()}
end
redis.pcall('HSETNX', bounds, 'heir', ARGV[5])
redis.pcall('PEXPIRE', bounds, life, 'LT') -- not after the registry
local heir = given(redis.pcall('HGET', bounds, 'heir')) or ARGV[5]
if redis.call('EXISTS', parted) == 0 and (given(redis.pcall('HLEN', counters)) or 0) > 0 then
  redis.call('RENAME', counters, parted)
  redis.call('HSET', parted, '', ARGV[2], HEIR, heir)
  redis.call('PEXPIRE', parted, life)
end
local served = given(redis.pcall('ZCOUNT', KEYS[3], now_ms(), '+inf')) or 0
if served == 0 then
  for i = 5, #KEYS do
    if i - 4 <= tonumber(ARGV[4]) then redis.pcall('XTRIM', KEYS[i], 'MAXLEN', 0) end
    redis.pcall('PEXPIRE', KEYS[i], life, 'LT')
  end
end
return {served > 0 and 1 or 0, heir, set_aside()}
