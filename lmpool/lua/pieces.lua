-- A worker tells what it has drawn of continuations that run. The id of an entry says how many tokens
-- there are up to its end: who reads goes on behind what it has, and nothing is there twice.
-- Of two workers that draw the same continuation the first to tell a token is right.
-- KEYS[1] a key of the shard. ARGV: prefix, life of the pieces in ms, then per piece: digest, tokens
--       before it, tokens up to its end, piece
-- Returns for each how many tokens are told now: fewer than up to its end where earlier pieces are
-- missing; -1 where others were told, -2 where the result is there.
local prefix, life = ARGV[1], ARGV[2]

-- How many tokens are told. What no worker wrote, of another type or by other ids, is taken away.
local function told(key)
  local last = given(redis.pcall('XREVRANGE', key, '+', '-', 'COUNT', 1))
  if last then
    local upto = last[1] and string.match(last[1][1], '^0%-(%d+)$')
    if upto or not last[1] then return tonumber(upto or 0) end
  end
  redis.call('DEL', key)
  return 0
end

local answers = {}
for i = 3, #ARGV, 4 do
  local digest, before, upto, piece = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]), ARGV[i + 3]
  local key = prefix .. ':result:' .. digest .. ':pieces'
  local answer
  if has_result(prefix, digest) then
    answer = -2
  else
    local there = told(key)
    if there == before then
      redis.call('XADD', key, '0-' .. ARGV[i + 2], 'piece', piece)
      redis.call('PEXPIRE', key, life)
      answer = upto
    elseif there < before then
      answer = there
    else
      local same = redis.call('XRANGE', key, '0-' .. ARGV[i + 2], '0-' .. ARGV[i + 2])[1]
      answer = same and same[2][2] == piece and upto or -1
    end
  end
  answers[#answers + 1] = answer
end
return answers
