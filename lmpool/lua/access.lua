-- Before every script: what others may have written is read with care. A key of the wrong type, a
-- field that is no number, a stream that takes no entry costs the one digest that it is about.

-- Bytes that a flight has at most; a longer one was not written by clients.
local MOST_FLIGHT_BYTES = 131072

-- Bytes of the longest job (lmpool.wire.MAX_JOB_BYTES): longer entries are moved by nobody.
local MAX_JOB_BYTES = 8388608
-- Lanes of a shard at most (lmpool.model_info.MAX_LANES).
local MAX_LANES = 1024

-- Refusals that say nothing of what a key holds: while a slot of a cluster is on its way, what has left is
-- not here; and what this user may not do, others may.
local NOT_OF_THE_KEY = {'non local key', 'ACL failure in script', "The user executing the script can't"}

-- What was answered, or nil where the server refused. Where nothing follows from that the script ends.
local function given(answer)
  if type(answer) == 'table' and answer['err'] then
    for _, sign in ipairs(NOT_OF_THE_KEY) do
      if string.find(tostring(answer['err']), sign, 1, true) then error(answer) end
    end
    return nil
  end
  return answer
end

-- Whether a result is there: a string that holds anything.
local function has_result(prefix, digest)
  local length = given(redis.pcall('STRLEN', prefix .. ':result:' .. digest))
  return length ~= nil and length > 0
end

-- How many of these keys there are, whatever they hold.
local function count_of(keys)
  local count = 0
  for k = 1, #keys, 1000 do
    count = count + (given(redis.pcall('EXISTS', unpack(keys, k, math.min(k + 999, #keys)))) or 0)
  end
  return count
end

-- What strings hold, in the order of their keys: false for what is none.
local function values_of(keys)
  local values = {}
  for k = 1, #keys, 1000 do
    local some = given(redis.pcall('MGET', unpack(keys, k, math.min(k + 999, #keys)))) or {}
    for v = 1, math.min(1000, #keys - k + 1) do values[k + v - 1] = some[v] or false end
  end
  return values
end

-- Keys are deleted, whatever they hold.
local function delete_all(keys)
  for k = 1, #keys, 1000 do redis.call('DEL', unpack(keys, k, math.min(k + 999, #keys))) end
end

-- How flights and the index of waiting lanes call a stream: by its lane, with 'b' before one of
-- priority batch.
local function lane_of(stream)
  local kind, lane = string.match(stream, ':(%a+):(%d+)$')
  return kind == 'batch' and 'b' .. lane or lane
end

-- The stream that is called so, or nil where none that workers read can be: a flight may name any.
local function stream_of(prefix, name, lanes)
  local batch, lane = string.match(name, '^(b?)(%d+)$')
  if not lane or #lane > 5 or (lanes and tonumber(lane) >= lanes) then return nil end
  return prefix .. (batch == 'b' and ':batch:' or ':jobs:') .. lane
end

-- Jobs wait in a stream, since at least the time of that entry: its lane is in the index.
local function note_waiting(prefix, stream, id)
  redis.pcall('ZADD', prefix .. ':waiting', 'NX', string.match(id, '^%d+'), lane_of(stream))
end

-- Have an idle worker look at the lanes that wait: at once, or first when they are anyone's. One call
-- that nobody has heard or that somebody follows is enough.
local function call_idle(prefix, at_once)
  local wake = prefix .. ':wake'
  -- Refused, nobody is called: all else is done by now, and a script that ended would do it twice.
  if redis.pcall('XLEN', wake) == 0 then redis.pcall('XADD', wake, '*', 'at_once', at_once) end
end

-- A flight is one string: the id of its job, how the job's stream is called, its deadline or nothing,
-- and the clients that wait, with a blank before and behind each.
local function flight_of(job, lane, deadline, waiting)
  return job .. ' ' .. lane .. ' ' .. deadline .. waiting
end

-- Those who wait, from now on with this client. Where thousands do, more are not noted: they find the
-- result as they look what became of their prompts, every few seconds.
local function with_client(waiting, client)
  local is_full = #waiting + #client > MOST_FLIGHT_BYTES - 256
  if is_full or string.find(waiting, ' ' .. client .. ' ', 1, true) then return waiting end
  return waiting .. client .. ' '
end

-- These four of a flight that was read, or nothing of what no client wrote.
local function parts_of(flight)
  if flight and #flight <= MOST_FLIGHT_BYTES then
    return string.match(flight, '^(%d+%-%d+) (b?%d+) (%d*)( .*)$')
  end
end

-- These four of the flight that a key holds. What is none is taken away: whoever waits for it finds the
-- result, or that nobody knows of it, and asks again.
local function read_flight(key)
  local flight = given(redis.pcall('GET', key))
  local job, lane, deadline, waiting = parts_of(flight)
  if not job and flight ~= false then given(redis.pcall('DEL', key)) end
  return job, lane, deadline, waiting
end

-- Each client that waits, once: whoever wrote a flight may have named one many times.
local function each_of(waiting)
  local names, seen = string.gmatch(waiting, '[^ ]+'), {}
  return function()
    local name
    repeat name = names() until not name or not seen[name]
    if name then seen[name] = true end
    return name
  end
end

-- A notice to a client: its id. No stream is made for one that is gone, and none is owed to who broke
-- it: then it is nothing.
local function tell(prefix, client, ...)
  return given(redis.pcall('XADD', prefix .. ':reply:' .. client, 'NOMKSTREAM', '*', ...))
end

-- An entry is done with.
local function take_off(jobs, group, id)
  redis.pcall('XACK', jobs, group, id) -- stream or group may be gone
  redis.pcall('XDEL', jobs, id)
end

-- Where this user can take entries off in neither way, the script ends: what it does before, it would do
-- again with each try.
local function see_that_it_comes_off(jobs, group)
  local acked = redis.pcall('XACK', jobs, group, '0-0')
  if type(acked) == 'table' then given(redis.pcall('XDEL', jobs, '0-0')) end
end

-- Whether that is a number as counters hold it: what HINCRBY takes, with room to count on.
local function is_count(text)
  return #text <= 18 and (text == '0' or string.find(text, '^[1-9]%d*$') ~= nil)
end

-- Bytes of an entry's names and values.
local function size_of(fields)
  local size = 0
  for _, value in ipairs(fields) do size = size + #value end
  return size
end

-- Milliseconds of the server's clock.
local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- Since when workers have beaten without a gap, in milliseconds of the server's clock: nil after one,
-- of a server that was away, hung, was restored or is another, and of a clock that was set back.
local function steady_since(steady)
  local since = tonumber(given(redis.pcall('GET', steady)) or '')
  if since and since <= now_ms() then return since end
  return nil
end

-- Ids this far ahead of the clock were not made by it: a stream that reached the last takes no more.
local FAR_AHEAD_MS = 1000 * 86400 * 366

-- Whether a stream, as far as there is one, takes entries: false for a key of another type too. Then the
-- last id that it has given.
local function takes_entries(stream)
  local info = given(redis.pcall('XINFO', 'STREAM', stream))
  if not info then return redis.call('EXISTS', stream) == 0 end
  for f = 1, #info, 2 do
    if info[f] == 'last-generated-id' then
      local ms = tonumber(string.match(info[f + 1], '^(%d+)-'))
      return ms < now_ms() + FAR_AHEAD_MS, info[f + 1]
    end
  end
  return true
end

-- What a stream says of its group of this name, by field; nothing where there is none.
local function group_of(stream, group)
  for _, found in ipairs(given(redis.pcall('XINFO', 'GROUPS', stream)) or {}) do
    local fields = {}
    for f = 1, #found, 2 do fields[found[f]] = found[f + 1] end
    if fields['name'] == group then return fields end
  end
  return nil
end
