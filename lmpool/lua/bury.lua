-- A job is given up: kept among the dead with the reason, told to whoever waits, taken off the stream.
-- KEYS[1] job stream, KEYS[2] stream of the dead.
-- ARGV: prefix, group, counter TTL, most dead kept, digest or '', stream id, status, error text for
--       the callers, then fields and values of the entry among the dead
local jobs, dead, prefix, group = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local digest, id, status, text = ARGV[5], ARGV[6], ARGV[7], ARGV[8]

-- Redis lets a script go on that has begun to write, also where the memory is full: who waits is told.
redis.pcall('PEXPIRE', prefix .. ':counters', ARGV[3])

-- Read before anything is kept: where that ends the script, whoever tries again would keep it again.
local flight = prefix .. ':flight:' .. digest
local job, _, waiting
if digest ~= '' then job, _, _, waiting = read_flight(flight) end

see_that_it_comes_off(jobs, group)
-- A stream of the dead that cannot be written must not keep the callers from being told.
local kept = redis.pcall('XADD', dead, 'MAXLEN', '~', ARGV[4], '*', unpack(ARGV, 9))
given(kept) -- not one that others may write: it would be lost
-- What happened to an old delivery says nothing about the job that is queued now.
if job == id then
  for client in each_of(waiting) do
    tell(prefix, client, 'digest', digest, 'status', status, 'error', text)
  end
  redis.call('DEL', flight)
end
take_off(jobs, group, id)
local counters = prefix .. ':counters'
redis.pcall('HINCRBY', counters, 'failed', 1)
redis.pcall('PEXPIRE', counters, ARGV[3])
if type(kept) == 'table' and kept['err'] then return kept['err'] end
return ''
