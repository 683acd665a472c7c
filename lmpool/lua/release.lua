-- A worker gives jobs back unrun: each goes to the end of its stream as a new entry, at once.
-- What is longer than any job stays with it: whoever takes it over buries it.
-- KEYS[1] and on: job streams. ARGV: prefix, group, lanes, then for each stream the number of its jobs, and per job:
--       digest or '', stream id
local prefix, group, lanes = ARGV[1], ARGV[2], tonumber(ARGV[3])
local released = 0

local function give_back(jobs, digest, id)
  local entry = (given(redis.pcall('XRANGE', jobs, id, id)) or {})[1]
  if not entry then
    take_off(jobs, group, id)
  elseif #entry[2] <= 100 and size_of(entry[2]) <= MAX_JOB_BYTES then
    local new = given(redis.pcall('XADD', jobs, '*', unpack(entry[2])))
    if new then
      take_off(jobs, group, id)
      local flight = prefix .. ':flight:' .. digest
      local job, lane, deadline, waiting
      if digest ~= '' then job, lane, deadline, waiting = read_flight(flight) end
      if job == id then
        redis.call('SET', flight, flight_of(new, lane, deadline, waiting), 'KEEPTTL')
      end
      released = released + 1
      if lanes > 1 then note_waiting(prefix, jobs, new) end
    end
  end
end

local at = 4
for _, jobs in ipairs(KEYS) do
  see_that_it_comes_off(jobs, group)
  local last = math.min(at + 2 * tonumber(ARGV[at]), #ARGV - 1) -- whoever calls it: it comes to its end
  for i = at + 1, last, 2 do give_back(jobs, ARGV[i], ARGV[i + 1]) end
  at = last + 1
end
if lanes > 1 and released > 0 then call_idle(prefix, '0') end
return released
