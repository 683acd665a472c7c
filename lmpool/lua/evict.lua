-- Make room among the results of a shard: the oldest go first, whatever their life. What a client was
-- told of and has not taken stays. What was restored without its life gets it once it is over.
-- KEYS[1] account. ARGV: prefix, counter TTL, most bytes to be held, most digests to be unlinked, and to be given
--       a life, most entries to be looked at, ms after which nobody is waited for, then client and notice of
--       those that are not waited for while that one is the first that they have not taken
-- Returns {bytes held, results unlinked, then client and first notice not taken of those waited for}.
local account, prefix = KEYS[1], ARGV[1]
local bound, most, looks, patience =
  tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])

-- Redis lets a script go on that has begun to write, also where the memory is full.
redis.pcall('XDEL', account, '0-1')
redis.call('DEL', prefix .. ':held') -- complete.lua reads the newest entry again
local newest = given(redis.pcall('XREVRANGE', account, '+', '-', 'COUNT', 1))
if not newest or newest[1] and not tonumber(newest[1][2][2]) then -- damaged: begin anew
  redis.call('DEL', account)
  return {0, 0}
end
newest = newest[1]
if not newest then return {0, 0} end
local held = tonumber(newest[2][2])
local before, unlinked, restored = held, 0, 0

local now = now_ms()

local given_up = {}
for i = 7, #ARGV, 2 do given_up[ARGV[i]] = ARGV[i + 1] end

local function parts(id)
  local ms, number = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(number)
end

-- The first notice that a client has not taken, or false where there is none: it may be gone.
local firsts = {}
local function first_of(client)
  local first = firsts[client]
  if first == nil then
    local found = given(redis.pcall('XRANGE', prefix .. ':reply:' .. client, '-', '+', 'COUNT', 1)) or {}
    first = found[1] and found[1][1] or false
    firsts[client] = first
  end
  return first
end

local waited, answer = {}, {held, 0}
local function is_awaited(fields)
  local awaited = false
  for f = 9, #fields, 2 do
    local client = fields[f]
    local first = first_of(client)
    if first and given_up[client] ~= first then
      local ms, number = parts(first)
      local told_ms, told_number = parts(fields[f + 1] or '')
      if told_ms and (ms < told_ms or (ms == told_ms and number <= told_number)) then
        awaited = true
        if not waited[client] then
          waited[client] = true
          answer[#answer + 1] = client
          answer[#answer + 1] = first
        end
      end
    end
  end
  return awaited
end

local function unlink(digests)
  local keys = {}
  for d = 1, #digests, 32 do
    keys[#keys + 1] = prefix .. ':result:' .. string.sub(digests, d, d + 31)
  end
  for k = 1, #keys, 1000 do
    unlinked = unlinked + redis.call('UNLINK', unpack(keys, k, math.min(k + 999, #keys)))
  end
end

-- Their time is over. What restores keys without their lives does that to all: the first one shows it.
local function see_ended(digests, life)
  if redis.call('PTTL', prefix .. ':result:' .. string.sub(digests, 1, 32)) ~= -1 then return end
  for d = 1, #digests, 32 do
    redis.pcall('PEXPIRE', prefix .. ':result:' .. string.sub(digests, d, d + 31), life, 'NX')
    restored = restored + 1
  end
end

local gone, from, done, kept = {}, '-', false, 0
while not done do
  local entries = redis.call('XRANGE', account, from, '+', 'COUNT', 16)
  if #entries == 0 then break end
  for _, entry in ipairs(entries) do
    local id, fields = entry[1], entry[2]
    local bytes, digests, at = tonumber(fields[4]), fields[8], parts(id)
    looks = looks - 1
    if looks < 0 then
      done = true
      break
    end
    local life = tonumber(fields[6])
    if not (bytes and life and digests) then -- no worker wrote this
      gone[#gone + 1] = id
    elseif digests == '' then -- only the sum
      if id ~= newest[1] then gone[#gone + 1] = id end
    elseif at + life <= now and restored < most then -- they ended by themselves
      see_ended(digests, fields[6])
      gone[#gone + 1] = id
      held = held - bytes
    elseif held <= bound or unlinked >= most or restored >= most then
      done = true
      break
    elseif now - at > patience or not is_awaited(fields) then
      unlink(digests)
      gone[#gone + 1] = id
      held = held - bytes
    else
      kept = kept + bytes
    end
  end
  from = '(' .. entries[#entries][1]
end

if not done then held = kept end -- all was looked at: a sum that was damaged is right again
if held <= 0 then
  redis.call('DEL', account)
elseif held ~= before or gone[#gone] == newest[1] then
  -- The sum stays known when the newest entry goes.
  redis.pcall('XADD', account, '*', 'held', string.format('%.0f', held), 'bytes', '0', 'life', '0',
    'digests', '')
  if newest[2][8] == '' then gone[#gone + 1] = newest[1] end
end
for g = 1, #gone, 1000 do
  redis.call('XDEL', account, unpack(gone, g, math.min(g + 999, #gone)))
end
if unlinked > 0 then
  redis.pcall('HINCRBY', prefix .. ':counters', 'evicted', unlinked)
  redis.pcall('PEXPIRE', prefix .. ':counters', ARGV[2])
end
answer[1], answer[2] = held, unlinked
return answer
