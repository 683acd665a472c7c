-- A worker mends what is the workers' own: what can only be damage is taken away, to be made anew;
-- clients ask again for the jobs in it. It also says what bounds the shard has, where no client can.
-- KEYS[1] and on: the streams.
-- ARGV: prefix, most jobs that wait in a stream, lanes, life of the bounds in ms, '1' of one that joins:
--       the latest to join decides how many jobs may wait, none of the streams ends any more, and a
--       damaged registry is left to others who know what was in it; the layout that the worker serves
-- Returns whether that is one and the shard is called otherwise, then the keys that were taken away.
local prefix, most, lanes, joins = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[5] == '1'
local bounds, registry = prefix .. ':bounds', prefix .. ':adapters'
local damaged, sound = {}, {}
for _, stream in ipairs(KEYS) do
  local list = takes_entries(stream) and sound or damaged
  list[#list + 1] = stream
end
for _, name in ipairs({':dead', ':account'}) do
  if not takes_entries(prefix .. name) then damaged[#damaged + 1] = prefix .. name end
end
local index = prefix .. ':waiting'
if not given(redis.pcall('ZCARD', index)) then damaged[#damaged + 1] = index end
local is_alone = (given(redis.pcall('ZCOUNT', prefix .. ':workers', now_ms(), '+inf')) or 0) < 2
for _, key in ipairs({prefix .. ':counters', bounds, registry}) do
  if not given(redis.pcall('HLEN', key)) and (key ~= registry or is_alone or not joins) then
    damaged[#damaged + 1] = key
    if key == registry then redis.pcall('HDEL', bounds, 'layout') end -- its sisters have it
  end
end
for _, key in ipairs(damaged) do redis.call('UNLINK', key) end
local counted = redis.call('HGETALL', prefix .. ':counters')
for f = 1, #counted, 2 do
  if not string.find(counted[f + 1], '^%d+$') or #counted[f + 1] > 18 then
    redis.call('HDEL', prefix .. ':counters', counted[f])
  end
end
local held = given(redis.pcall('HGET', bounds, 'backlog'))
held = held and string.find(held, '^[1-9]%d*$') and #held <= 15 and tonumber(held)
if joins or not held then
  redis.pcall('HSET', bounds, 'backlog', most)
  held = most
end
local said = given(redis.pcall('HGET', bounds, 'lanes'))
if joins or not said or not string.find(said, '^[1-9]%d?%d?%d?$') or tonumber(said) > MAX_LANES then
  redis.pcall('HSET', bounds, 'lanes', lanes)
end
redis.pcall('PEXPIRE', bounds, ARGV[4])
-- Clients keep the bound; what was put there past it they ask for again. Jobs that change their
-- stream may double it.
for _, stream in ipairs(sound) do
  redis.pcall('XTRIM', stream, 'MAXLEN', '~', 2 * held)
  -- The index of waiting lanes may have lost one.
  if tonumber(lanes) > 1 and lane_of(stream) and redis.call('XLEN', stream) > 0 then
    note_waiting(prefix, stream, string.format('%.0f', now_ms()))
  end
end
if joins then
  for _, stream in ipairs(sound) do redis.call('PERSIST', stream) end
  for _, name in ipairs({':dead', ':adapters', ':account', ':waiting'}) do
    redis.call('PERSIST', prefix .. name)
  end
end
local layout = given(redis.pcall('HGET', bounds, 'layout')) or ''
return {ARGV[6] ~= '' and layout ~= ARGV[6] and 1 or 0, unpack(damaged)}
