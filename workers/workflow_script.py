"""The script of `workers.workflows`, which Redis runs: all that is asked or told of workflows at once."""

from __future__ import annotations

# Of the first calls of each, how they began (c) and ended (e) is kept, some 60 bytes: what a graph is matched by.
# Each workflow is one entry of its tenant's sorted set, which counts them, and one hash, whose key is that of the set,
# a bar, which no tenant's name has, and the workflow's id. The first deadline that a workflow is given counts, so that
# clients can send it with every request.
RUN = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local kept, most, found = tonumber(ARGV[1]), tonumber(ARGV[2]), {}

-- A gateway (`asker`) numbers its runs of this script. Up to `given_up` nobody waits for their answers any more, and
-- what was missed has been told: Redis may do a run late. `missed`: of the run that told first what this one tells.
local asker, own_run, missed = ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8])
local given_up_key = 'slackline:workflows::given_up:' .. asker
local given_up = asker == '' and -1 or tonumber(redis.call('GET', given_up_key) or 0)

-- Since when Redis remembers. Who tells another time (`remembers`) has seen an earlier memory, which was lost: it is
-- answered nothing, since it can tell first what it knows of workflows.
local memory_key, remembers = 'slackline:workflows::memory', ARGV[9]
local since, lost = unpack(redis.call('HMGET', memory_key, 'since', 'before'))
if not since then
  since = string.format('%.6f', now)
  redis.call('HSET', memory_key, 'since', since)
end
if remembers ~= '' and remembers ~= since then
  if not lost then redis.call('HSET', memory_key, 'before', remembers) end
  return {since}
end

-- Whether a workflow that Redis saw begin at `began` may have begun before, in a memory that was lost: until then, each
-- was known for its deadline, and for `kept` more.
local function may_be_older(began, deadline)
  return lost and began and deadline and tonumber(began) < tonumber(since) + tonumber(deadline) + kept
end

local function named(key, workflow) return 'slackline:workflows::named:' .. string.sub(key, 21) .. '|' .. workflow end

local function forget(key, before)
  for _, workflow in ipairs(redis.call('ZRANGEBYSCORE', key, '-inf', before, 'LIMIT', 0, 10)) do
    redis.call('ZREM', key, workflow)
    redis.call('DEL', key .. '|' .. workflow, named(key, workflow))
  end
end

local function begin(key, workflow, deadline, stages, began)
  forget(key, now - kept)
  if redis.call('ZCARD', key) >= most then forget(key, now) end
  if redis.call('ZCARD', key) >= most then return false end
  local due, state = string.format('%.6f', began + deadline), key .. '|' .. workflow
  redis.call('ZADD', key, due, workflow)
  redis.call('EXPIRE', key, 86400 + kept)
  redis.call('DEL', state, named(key, workflow))
  redis.call('HSET', state, 'due', due, 'began', string.format('%.6f', began), 'deadline', deadline, 'stages', stages)
  redis.call('EXPIRE', state, math.ceil(deadline + kept))
  return true
end

local function read(key, workflow, new)
  local due = redis.call('ZSCORE', key, workflow)
  return due and {string.format('%.6f', now), due, new, redis.call('HGETALL', key .. '|' .. workflow)}
end

-- Whether a step of this number failed: nothing that it computed counts, and who computes it again takes its name.
local function failed(state, number)
  local ended = redis.call('HGET', state, 'e' .. number)
  return ended and string.sub(ended, 1, 2) == '-1'
end

-- Tool steps have names of their own, so that none takes a request's.
local function of_tool(name) return 'tool ' .. name end

-- The numbers of the parents, '' without any; false and what is wrong with which of them. Those that Redis may have
-- forgotten count as not told.
local function numbers_of(names, state, own, parents, older)
  local numbers, before = {}, redis.call('ZSCORE', names, own)
  if before and failed(state, before) then before = false end
  for index, parent in ipairs(parents) do
    local number = redis.call('ZSCORE', names, parent) or redis.call('ZSCORE', names, of_tool(parent))
    if number then
      if before and tonumber(number) >= tonumber(before) then return false, 'cycle ' .. index end
      numbers[#numbers + 1] = number
    elseif not older then
      return false, 'unknown ' .. index
    end
  end
  return (#numbers > 0 or #parents == 0) and table.concat(numbers, ',')
end

local function call_of(key, workflow, call, most, own, numbers, at)
  local state, names = key .. '|' .. workflow, named(key, workflow)
  local number = redis.call('HINCRBY', state, 'calls', 1)
  call = call .. ' ' .. string.format('%.3f', at)
  if number <= tonumber(most) then
    redis.call('HSET', state, 'c' .. number, call)
    if numbers then redis.call('HSET', state, 'p' .. number, numbers) end
  end
  local before = redis.call('ZSCORE', names, own)
  if not before or failed(state, before) then
    redis.call('ZREMRANGEBYRANK', names, 0, -tonumber(ARGV[5])) -- first: beyond 128 it would take thrice the memory
    redis.call('ZADD', names, number, own)
    if not before then redis.call('PEXPIRE', names, math.max(1, redis.call('PTTL', state))) end
  end
  return number
end

-- The numbers that calls got in the newest run of this gateway, by the digests of their names: it may miss the answer.
local given = {}

local function remember(state, own, number)
  if asker == '' then return end
  given[state] = (given[state] or own_run .. ' ') .. own .. ' ' .. number .. ' '
  redis.call('HSET', state, 'given' .. asker, given[state])
end

local function remembered(state, asked, own)
  local field = 'given' .. asker
  local before = redis.call('HGET', state, field)
  if not before or string.sub(before, 1, #asked + 1) ~= asked .. ' ' then return nil end
  local number = string.match(before, ' ' .. own .. ' (%d+) ')
  if number then redis.call('HSET', state, field, (string.gsub(before, ' ' .. own .. ' %d+ ', ' ', 1))) end
  return tonumber(number)
end

local function calls_of(state, wanted)
  return wanted == '' and {} or redis.call('HGETALL', state) -- to ask field by field would read it as often
end

-- The tool steps that were reported since the last call: the record of this one has them.
local function untold(state, count, told)
  local fields = {}
  for number = (tonumber(told) or 0) + 1, tonumber(count) or 0 do fields[#fields + 1] = 't' .. number end
  if #fields == 0 then return {} end
  redis.call('HSET', state, 'told', count)
  return redis.call('HMGET', state, unpack(fields))
end

local act = {}

function act.join(key, workflow, deadline, call, wanted, most, own, told, ...)
  if own_run <= given_up then return false end
  local due, state = redis.call('ZSCORE', key, workflow), key .. '|' .. workflow
  if due then
    local known = redis.call('HMGET', state, 'by', 'stages', 'tools', 'told', 'deadline', 'aside', 'began')
    if known[1] then return known[1] end
    if redis.call('ZSCORE', named(key, workflow), of_tool(own)) then return 'exists' end
    local numbers, wrong = false, nil
    if told ~= '' then
      local older = may_be_older(known[7], known[5])
      numbers, wrong = numbers_of(named(key, workflow), state, own, {...}, older)
      if wrong then return wrong end
    end
    local number = call_of(key, workflow, call, most, own, numbers, now)
    remember(state, own, number)
    local tools = known[3] ~= known[4] and untold(state, known[3], known[4]) or {}
    local before = math.max(0, number - 1 - (known[6] or 0))
    local calls, left = calls_of(state, wanted), string.format('%.6f', due - now)
    return {left, 0, known[2] or '', number, calls, tools, known[5] or '', before}
  end
  if deadline == '' then return false end
  if ... and not may_be_older(now, deadline) then return 'unknown 1' end
  if not begin(key, workflow, deadline, '', now) then return 'full' end
  local number = call_of(key, workflow, call, most, own, told ~= '' and not ... and '', now)
  remember(state, own, number)
  return {deadline, 1, '', number, calls_of(key .. '|' .. workflow, wanted), {}, deadline, 0}
end

-- A request that went on without an answer, `ago` before now: it has its number for its name alone, and is no call that
-- others are matched by, since nobody tells its end. It began its workflow nevertheless.
function act.miss(key, workflow, deadline, call, most, own, asked, ago)
  if missed <= given_up then return false end
  local state, began = key .. '|' .. workflow, now - ago
  local number = remembered(state, asked, own)
  if not number then
    local known = redis.call('ZSCORE', key, workflow)
    if not known and (deadline == '' or not begin(key, workflow, deadline, '', began)) then return false end
    number = call_of(key, workflow, call, most, own, false, began)
  end
  redis.call('HINCRBY', state, 'aside', 1)
  if number <= tonumber(most) then redis.call('HSET', state, 'e' .. number, '-1 ' .. string.format('%.3f', now)) end
  return false
end

function act.tool(key, workflow, call, most, own, told, took, ago, what, most_tools, most_bytes, ...)
  local state = key .. '|' .. workflow
  if not redis.call('ZSCORE', key, workflow) then return false end
  local by, began_at, deadline = unpack(redis.call('HMGET', state, 'by', 'began', 'deadline'))
  if by then return by end
  local names = named(key, workflow)
  local before, request = redis.call('ZSCORE', names, of_tool(own)), redis.call('ZSCORE', names, own)
  if before then return tonumber(before) end
  if request and not failed(state, request) then return 'exists' end
  local numbers, wrong = false, nil
  if told ~= '' then
    numbers, wrong = numbers_of(named(key, workflow), state, own, {...}, may_be_older(began_at, deadline))
    if wrong then return wrong end
  end
  if request then redis.call('ZREM', names, own) end
  own = of_tool(own)
  local ended = now - ago
  local began = ended - took
  local number = call_of(key, workflow, call, most, own, numbers, began)
  redis.call('HINCRBY', state, 'aside', 1)
  if number <= tonumber(most) then redis.call('HSET', state, 'e' .. number, '0 ' .. string.format('%.3f', ended)) end
  local count, bytes = unpack(redis.call('HMGET', state, 'tools', 'tool_bytes'))
  count, what = tonumber(count or 0), string.format('%.3f %.3f ', began, ended) .. what
  bytes = tonumber(bytes or 0) + #what
  if count < tonumber(most_tools) and bytes <= tonumber(most_bytes) then
    redis.call('HSET', state, 'tools', count + 1, 'tool_bytes', bytes, 't' .. (count + 1), what)
  end
  return number
end

function act.open(key, workflow, deadline, stages)
  if redis.call('ZSCORE', key, workflow) then
    local known = redis.call('HMGET', key .. '|' .. workflow, 'deadline', 'stages', 'by')
    if known[1] ~= deadline or known[2] ~= stages or known[3] then return 'other' end
    return read(key, workflow, 0)
  end
  return begin(key, workflow, deadline, stages, now) and read(key, workflow, 1) or 'full'
end

-- What a gateway knows of a workflow that began `ago` before now, in a memory that was lost.
function act.restore(key, workflow, deadline, stages, ago)
  local began = now - ago
  if not redis.call('ZSCORE', key, workflow) and lost and began < tonumber(since) and began + deadline + kept > now then
    begin(key, workflow, deadline, stages, began)
  end
  return false
end

function act.read(key, workflow)
  return read(key, workflow, 0)
end

function act.cancel(key, workflow, by, tenant)
  local due, state, new = redis.call('ZSCORE', key, workflow), key .. '|' .. workflow, 0
  if due and redis.call('HSETNX', state, 'by', by) == 1 then
    new = 1
    redis.call('HSET', state, 'cancelled', string.format('%.6f', now))
    if tonumber(due) > now then redis.call('ZADD', key, string.format('%.6f', now), workflow) end
    redis.call('XADD', ARGV[3], 'MAXLEN', '~', ARGV[4], '*', 'tenant', tenant, 'workflow', workflow, 'by', by)
  end
  return read(key, workflow, new)
end

-- Whether this teller has told as much already: Redis may do late what nobody waits for any more.
local function known(state, teller, telling)
  local before = teller ~= '' and redis.call('HGET', state, 'from' .. teller)
  return before and tonumber(before) >= tonumber(telling)
end

function act.count(key, workflow, seen, answered, failed, tokens, aside, ago, ends, teller, telling)
  local state = key .. '|' .. workflow
  if redis.call('ZSCORE', key, workflow) and not known(state, teller, telling) then
    if teller ~= '' then redis.call('HSET', state, 'from' .. teller, telling) end
    redis.call('HINCRBY', state, 'seen', seen)
    redis.call('HINCRBY', state, 'answered', answered)
    redis.call('HINCRBY', state, 'failed', failed)
    redis.call('HINCRBY', state, 'tokens', tokens)
    redis.call('HINCRBY', state, 'aside', aside)
    if ago ~= '' then redis.call('HSET', state, 'ended', string.format('%.6f', now - ago)) end
    for number, output, before in string.gmatch(ends, '(%d+) (%-?%d+) ([%d.]+)') do
      if redis.call('HEXISTS', state, 'c' .. number) == 1 then
        redis.call('HSET', state, 'e' .. number, output .. ' ' .. string.format('%.3f', now - before))
      end
    end
  end
  return false
end

local at = 10
for index, key in ipairs(KEYS) do
  local count = tonumber(ARGV[at + 1])
  found[index] = act[ARGV[at]](key, unpack(ARGV, at + 2, at + 1 + count))
  at = at + 2 + count
end
if missed > given_up then redis.call('SET', given_up_key, missed, 'EX', 2 * kept) end
found[#KEYS + 1] = since
return found
"""
