-- A worker reads again what it was given beyond an id, as that may never have reached it. Reading it
-- with XREADGROUP would count another delivery. What was delivered to a worker that died is left out: it
-- is run alone.
-- KEYS[1] job stream. ARGV: group, who asks, the id, most entries
-- Returns {id, {field, value...}} of each, of one that was withdrawn without fields.
local jobs, group, me = KEYS[1], ARGV[1], ARGV[2]
local found, size = {}, 0
for _, held in ipairs(redis.call('XPENDING', jobs, group, '(' .. ARGV[3], '+', ARGV[4], me)) do
  if held[4] == 1 then
    local entry = redis.call('XCLAIM', jobs, group, me, 0, held[1], 'RETRYCOUNT', 1)[1]
    found[#found + 1] = entry or {held[1], {}}
    size = size + (entry and size_of(entry[2]) or 0)
    if size > MAX_JOB_BYTES then break end -- what follows is read next
  end
end
return found
