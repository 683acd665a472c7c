-- A worker gives jobs back unrun: each goes to the end of the stream as a new entry, at once.
-- KEYS[1] job stream. ARGV: prefix, group, then per job: digest or '', stream id
local jobs, prefix, group = KEYS[1], ARGV[1], ARGV[2]
local released = 0
for i = 3, #ARGV, 2 do
  local digest, id = ARGV[i], ARGV[i + 1]
  local entry = redis.call('XRANGE', jobs, id, id)[1]
  redis.call('XACK', jobs, group, id)
  if entry then
    redis.call('XDEL', jobs, id)
    local new = redis.call('XADD', jobs, '*', unpack(entry[2]))
    local flight = prefix .. ':flight:' .. digest
    if digest ~= '' and redis.call('HGET', flight, 'job') == id then
      redis.call('HSET', flight, 'job', new)
    end
    released = released + 1
  end
end
return released
