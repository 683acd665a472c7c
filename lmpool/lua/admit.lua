-- Before a batch that has waited is run: drop what nobody waits for any more.
--   r  run it    x  its result is there already    w  withdrawn (dropped here)    e  expired (too)
-- KEYS[1] job stream. ARGV: prefix, group, counter TTL, then per job: digest, stream id
local jobs, prefix, group = KEYS[1], ARGV[1], ARGV[2]
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local answers = {}
for i = 4, #ARGV, 2 do
  local digest, id = ARGV[i], ARGV[i + 1]
  local flight = prefix .. ':flight:' .. digest
  local answer
  if redis.call('EXISTS', prefix .. ':result:' .. digest) == 1 then
    answer = 'x'
  else
    local fields = redis.call('HGETALL', flight)
    local deadline, job
    local waiting = {}
    for f = 1, #fields, 2 do
      if fields[f] == 'deadline' then
        deadline = tonumber(fields[f + 1])
      elseif fields[f] == 'job' then
        job = fields[f + 1]
      elseif string.sub(fields[f], 1, 2) == 'c:' then
        local reply = prefix .. ':reply:' .. string.sub(fields[f], 3)
        if redis.call('EXISTS', reply) == 1 then waiting[#waiting + 1] = reply end
      end
    end
    if #waiting == 0 or (job and job ~= id) then
      answer = 'w'
    elseif deadline and deadline <= now then
      answer = 'e'
      for _, reply in ipairs(waiting) do
        redis.call('XADD', reply, '*', 'digest', digest, 'status', 'expired', 'error', '')
      end
    else
      answer = 'r'
    end
    if answer ~= 'r' then
      if job == id then redis.call('DEL', flight) end
      redis.call('XACK', jobs, group, id)
      redis.call('XDEL', jobs, id)
      if answer == 'e' then
        redis.call('HINCRBY', prefix .. ':counters', 'expired', 1)
        redis.call('PEXPIRE', prefix .. ':counters', ARGV[3])
      end
    end
  end
  answers[#answers + 1] = answer
end
return table.concat(answers)
