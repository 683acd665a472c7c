-- A worker mends what is the workers' own: what can only be damage is taken away, to be made anew;
-- clients ask again for the jobs in it. It also says what bounds the shard has, where no client can.
-- KEYS[1] and on: the streams.
-- ARGV: prefix, most jobs that wait in a stream, lanes, life of the bounds in ms, '1' of one that joins:
--       the latest to join decides how many jobs may wait, none of the streams ends any more, and a
--       damaged registry is left to others who know what was in it; the layout that the worker serves, group
-- Returns whether that is one and the shard is called otherwise, how many jobs were passed over, then the
-- keys that were taken away.
local prefix, most, lanes, joins = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[5] == '1'
local group = ARGV[7]
local bounds, registry = prefix .. ':bounds', prefix .. ':adapters'
local damaged, sound, last_ids = {}, {}, {}
for _, stream in ipairs(KEYS) do
  local takes, last = takes_entries(stream)
  local list = takes and sound or damaged
  list[#list + 1] = stream
  last_ids[stream] = last
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
  if not is_count(counted[f + 1]) then
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

-- Whether an id comes after another. A double holds no such number.
local function is_after(id, other)
  local ms, number = string.match(id, '^(%d+)-(%d+)$')
  local other_ms, other_number = string.match(other, '^(%d+)-(%d+)$')
  if ms == other_ms then ms, other_ms = number, other_number end
  if #ms ~= #other_ms then return #ms > #other_ms end
  return ms > other_ms
end

-- What the group was given stands in the stream for as long as a worker has it. What does not, and is
-- nobody's, comes to nobody any more: somebody set the group's place beyond it, or took it from who had
-- it. It is taken off: what is older than all that workers have at once, what lies among the oldest of
-- that in parts, where streams are `looked_in`, and what is behind more of it once these are done.
-- Returns how many entries that were.
local LOOKED_AT, PART = 16, 1000
local function take_off_passed(stream, looked_in)
  local found = group_of(stream, group)
  if not found then return 0 end
  local place, last = found['last-delivered-id'], last_ids[stream]
  if last and is_after(place, last) then -- new ones would be behind it, too
    if not given(redis.pcall('XGROUP', 'SETID', stream, group, last)) then return 0 end
    place = last
  end
  if #redis.call('XRANGE', stream, '-', place, 'COUNT', 1) == 0 then return 0 end
  local held = redis.call('XPENDING', stream, group, '-', place, LOOKED_AT)
  local first = held[1] or redis.call('XRANGE', stream, '(' .. place, '+', 'COUNT', 1)[1]
  local passed
  if first then
    passed = redis.call('XTRIM', stream, 'MINID', first[1])
  else
    passed = redis.call('XTRIM', stream, 'MAXLEN', 0)
  end
  if not looked_in then return passed end
  local most_passed = passed + PART
  for h = 1, #held do
    local upto = held[h + 1] and '(' .. held[h + 1][1] or place
    while passed < most_passed and (held[h + 1] or h < LOOKED_AT) do
      local entry = redis.call('XRANGE', stream, '(' .. held[h][1], upto, 'COUNT', 1)[1]
      if not entry then break end
      redis.call('XDEL', stream, entry[1])
      passed = passed + 1
    end
  end
  return passed
end
-- Of many streams some are looked in, in turn by the clock: it takes as long as all else here.
local LOOKED_IN = 32
local begin = #sound > LOOKED_IN and math.floor(now_ms() / 1000) * LOOKED_IN % #sound or 0
local passed = 0
for s, stream in ipairs(sound) do
  local count = take_off_passed(stream, (s - 1 - begin) % #sound < LOOKED_IN)
  if lane_of(stream) then passed = passed + count end -- a call to look is nobody's loss
end

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
  for _, name in ipairs({':dead', ':adapters', ':waiting'}) do
    redis.call('PERSIST', prefix .. name)
  end
end
local layout = given(redis.pcall('HGET', bounds, 'layout')) or ''
return {ARGV[6] ~= '' and layout ~= ARGV[6] and 1 or 0, passed, unpack(damaged)}
