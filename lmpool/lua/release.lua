-- A worker gives jobs back unrun: each goes to the end of the stream as a new entry, at once.
-- What is longer than any job stays with it: whoever takes it over buries it.
-- KEYS[1] job stream. ARGV: prefix, group, then per job: digest or '', stream id
local jobs, prefix, group = KEYS[1], ARGV[1], ARGV[2]
local released = 0
for i = 3, #ARGV, 2 do
  local digest, id = ARGV[i], ARGV[i + 1]
  local entry = (given(redis.pcall('XRANGE', jobs, id, id)) or {})[1]
  if not entry then
    take_off(jobs, group, id)
  elseif #entry[2] <= 100 and size_of(entry[2]) <= MAX_JOB_BYTES then
    local new = given(redis.pcall('XADD', jobs, '*', unpack(entry[2])))
    if new then
      take_off(jobs, group, id)
      local flight = prefix .. ':flight:' .. digest
      if digest ~= '' and redis.pcall('HGET', flight, 'job') == id then
        redis.call('HSET', flight, 'job', new)
      end
      released = released + 1
    end
  end
end
return released
