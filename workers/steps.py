"""Answers of steps that a client asked to be kept, in Redis: each until its tenant's retention is over.

With stored responses, which are kept among them (`workers.stored_responses`), they are the only text of requests that
is stored anywhere, and only of tenants that have a retention. Redis ends each
by itself. A tenant's answers are one sorted set by the time at which they end, whose members tell what each takes, so
that their number and bytes can be bounded; where they are not, those that end soonest make room. A set for each
workflow lets it be forgotten whole.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from workers.live import Dialogue

STEPS_KEY = "answers:{tenant}"  # a name of its own: of all users of Redis, gateways alone may read these
MOST_STEPS = 10_000  # of one tenant
MOST_BYTES = 32 << 20  # of one tenant
LARGEST_BYTES = 256 << 10  # of one answer with what is kept beside it
AT_ONCE = 200  # that one script drops: some 2 ms

# No tenant's name has a bar. After one comes the name of a step (32 hex digits, a colon, its workflow) for its answer,
# after two a workflow's id for its set, and `bytes` for what all take. Members: bytes, a colon, name of the step.
_SCRIPT = """
local key, bytes = KEYS[1], KEYS[1] .. '|bytes'
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6

local function drop(member)
  local colon = string.find(member, ':', 1, true)
  local name = string.sub(member, colon + 1)
  if redis.call('ZREM', key, member) == 1 and redis.call('DECRBY', bytes, string.sub(member, 1, colon - 1)) <= 0 then
    redis.call('DEL', bytes)
  end
  redis.call('DEL', key .. '|' .. name)
  redis.call('SREM', key .. '||' .. string.sub(name, 34), member)
end

local function lasts(other, ms)
  if redis.call('PTTL', other) < ms then redis.call('PEXPIRE', other, ms) end
end

local act = {}

-- Whether there is room for what takes `size` bytes in place of `own` (a member, or nil for none). Some is made.
local function has_room(size, own, most, most_bytes, at_once)
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, at_once)) do
    if member ~= own then drop(member) end
  end
  local own_bytes = own and tonumber(string.match(own, '^%d+')) or 0
  local function over()
    local taken = tonumber(redis.call('GET', bytes) or 0) - own_bytes
    return redis.call('ZCARD', key) - (own and 1 or 0) >= tonumber(most) or taken + size > tonumber(most_bytes)
  end
  for _, member in ipairs(redis.call('ZRANGE', key, 0, at_once - (own and 0 or 1))) do
    if not over() then break end
    if member ~= own then drop(member) end
  end
  return not over()
end

-- An answer that was written, by `more` bytes, ends after `seconds`.
local function counted(name, more, seconds)
  local ms, workflow = math.ceil(seconds * 1000), key .. '||' .. string.sub(name, 34)
  local member = redis.call('STRLEN', key .. '|' .. name) .. ':' .. name
  redis.call('PEXPIRE', key .. '|' .. name, ms)
  redis.call('ZADD', key, string.format('%.3f', now + seconds), member)
  if more > 0 then redis.call('INCRBY', bytes, more) end
  redis.call('SADD', workflow, member)
  lasts(workflow, ms)
  lasts(key, ms + 60000)
  lasts(bytes, ms + 60000)
  return 'kept'
end

local function place(name, answer, seconds)
  redis.call('SET', key .. '|' .. name, answer)
  return counted(name, #answer, seconds)
end

-- The events that a response told while it was open are kept beside it, and end with it.
local function events_of(name) return 'events' .. string.rep('-', 26) .. string.sub(name, 33) end

local function last(name, seconds)
  if redis.call('EXISTS', key .. '|' .. name) == 1 then counted(name, 0, seconds) end
end

function act.keep(name, answer, seconds, ...)
  if redis.call('EXISTS', key .. '|' .. name) == 1 then return 'known' end
  if not has_room(#answer, nil, ...) then return 'full' end
  return place(name, answer, seconds)
end

local function is_open(name, mark)
  local found = key .. '|' .. name
  return redis.call('GETRANGE', found, 0, #mark - 1) == mark, redis.call('STRLEN', found)
end

function act.replace(mark, name, answer, seconds, ...)
  local open, size = is_open(name, mark)
  if not open then return size > 0 and 'known' or 'gone' end
  local own = size .. ':' .. name
  if not has_room(#answer, own, ...) then return 'full' end
  drop(own)
  last(events_of(name), seconds)
  return place(name, answer, seconds)
end

function act.renew(mark, name, lease, ms, seconds)
  if not is_open(name, mark) then return 0 end
  redis.call('SET', lease, 1, 'PX', ms)
  last(name, seconds)
  last(events_of(name), seconds)
  return 1
end

-- `piece` goes to the events of an open response, of which `at` bytes are there already, and never more than `largest`.
function act.extend(mark, name, at, piece, largest, seconds, ...)
  if not is_open(name, mark) then return 'gone' end
  local events = events_of(name)
  local size, grown = redis.call('STRLEN', key .. '|' .. events), at + #piece
  if size == grown then return 'kept' end -- before: its gateway did not hear of it
  if size ~= tonumber(at) then return 'gone' end
  if grown > tonumber(largest) then return 'too_large' end
  local own = size > 0 and size .. ':' .. events or nil
  if not has_room(grown, own, ...) then return 'full' end
  redis.call('APPEND', key .. '|' .. events, piece)
  if own then
    redis.call('ZREM', key, own)
    redis.call('SREM', key .. '||' .. string.sub(events, 34), own)
  end
  return counted(events, #piece, seconds)
end

function act.look(mark, name, lease, at)
  local open, size = is_open(name, mark)
  local events, state = key .. '|' .. events_of(name), size > 0 and 'ended' or 'gone'
  if open then state = redis.call('EXISTS', lease) == 1 and 'leased' or 'open' end
  return {state, redis.call('STRLEN', events), redis.call('GETRANGE', events, at, -1)}
end

function act.drop_events(name)
  local events = events_of(name)
  drop(redis.call('STRLEN', key .. '|' .. events) .. ':' .. events)
  return 1
end

function act.forget(workflow, at_once)
  local members = redis.call('SPOP', key .. '||' .. workflow, at_once)
  for _, member in ipairs(members) do drop(member) end
  return #members
end

function act.forget_all(at_once)
  local members = redis.call('ZRANGE', key, 0, at_once - 1)
  for _, member in ipairs(members) do drop(member) end
  return #members
end

return act[ARGV[1]](unpack(ARGV, 2))
"""


def name_of_step(workflow: str, step: str) -> str:
    return f"{sha256(step.encode()).hexdigest()[:32]}:{workflow}"


def read_step(tenant: str, workflow: str, step: str) -> Dialogue[bytes | None]:
    """What was kept of the step; None if nothing was, or it has ended."""
    found: bytes | None = yield ("GET", f"{STEPS_KEY.format(tenant=tenant)}|{name_of_step(workflow, step)}")
    return found


def keep_step(tenant: str, workflow: str, step: str, answer: bytes, retention_s: float) -> Dialogue[str]:
    """`kept`, `known` (there is one already, which stays) or `full`."""
    told = (name_of_step(workflow, step), answer, retention_s, MOST_STEPS, MOST_BYTES, AT_ONCE)
    found: bytes = yield from run_script(tenant, "keep", *told)
    return found.decode()


def run_script(tenant: str, act: str, *told: str | bytes | float) -> Dialogue[Any]:
    """`act`: a function of the script, on the answers of this tenant."""
    found = yield ("EVAL", _SCRIPT, 1, STEPS_KEY.format(tenant=tenant), act, *told)
    return found


def forget_steps(tenant: str, workflow: str | None) -> Dialogue[int]:
    """Those of one workflow, or all of the tenant; returns how many."""
    told = ("forget_all",) if workflow is None else ("forget", workflow)
    gone = 0
    while count := (yield from run_script(tenant, *told, AT_ONCE)):
        gone += count
    return gone
