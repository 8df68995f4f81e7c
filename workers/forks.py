"""Checkpoints of steps and forks of workflows, in Redis: where the KV of a step is, and which branches go on from it.

Each entry ends with the lease of its checkpoint. The KV is at an engine; here is only who finds it. A tenant's
checkpoints, and its forks, are one sorted set each by the time at which they end, so that their number is bounded in
the script that writes: of checkpoints those that end soonest make room, further forks are refused. The forks of one
checkpoint are such a set too: after the last branch of the last one it is freed.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, NamedTuple

import orjson

from workers.live import Dialogue
from workers.steps import STEPS_KEY, name_of_step

LONGEST_LEASE_S = 3_600.0  # that a client may ask for
MOST_CHECKPOINTS = 10_000  # of one tenant: some 6 MB
MOST_FORKS = 10_000  # of one tenant: some 11 MB
AT_ONCE = 200  # that one script drops: some 2 ms

# After the bar of the key: what is no name of an answer (`workers.steps`). `at:` and the name of a step is where its
# checkpoint is, `steps:` and a workflow the set of its names, `fork:` and `left:` what a fork goes on from and the
# numbers of its open branches. Releases before 2026-12 know these four. `asked:` is how a fork was asked for, a list of
# how many branches, the step (hashed) and the request that left the checkpoint; `of:` and that request its open forks.
_SCRIPT = """
local key, checkpoints, forks = KEYS[1] .. '|', KEYS[1] .. '|checkpoints', KEYS[1] .. '|forks'
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6

local function drop(name)
  redis.call('ZREM', checkpoints, name)
  redis.call('DEL', key .. 'at:' .. name)
  redis.call('SREM', key .. 'steps:' .. string.sub(name, 34), name)
end

local function list_of(raw)
  local read, found = pcall(cjson.decode, raw)
  return read and type(found) == 'table' and found or {}
end

local function asked(fork)
  local raw = redis.call('GET', key .. 'asked:' .. fork)
  local told = raw and list_of(raw)
  return told and told[3] and told
end

local function drop_fork(fork)
  local told = asked(fork)
  if told then redis.call('ZREM', key .. 'of:' .. told[3], fork) end
  redis.call('ZREM', forks, fork)
  redis.call('DEL', key .. 'fork:' .. fork, key .. 'left:' .. fork, key .. 'asked:' .. fork)
end

-- How it was asked for, while it is open and its workflow not cancelled.
local function open_as(fork)
  local told = asked(fork)
  return told and redis.call('ZSCORE', key .. 'of:' .. told[3], fork) and told
end

-- Whether forks are open that go on from what a request left.
local function needed(request)
  redis.call('ZREMRANGEBYSCORE', key .. 'of:' .. request, '-inf', now)
  return redis.call('ZCARD', key .. 'of:' .. request) > 0
end

local function ended(entries, at_once) return redis.call('ZRANGEBYSCORE', entries, '-inf', now, 'LIMIT', 0, at_once) end

local function lasts(entries, how, entry, seconds, longest)
  redis.call('ZADD', entries, how, string.format('%.3f', now + seconds), entry)
  redis.call('PEXPIRE', entries, longest * 1000 + 60000)
end

local act = {}

function act.keep(name, found, seconds, longest, most, at_once)
  for _, other in ipairs(ended(checkpoints, at_once)) do drop(other) end
  local over = redis.call('ZCARD', checkpoints) - most + 1
  if over > 0 and not redis.call('ZSCORE', checkpoints, name) then
    for _, other in ipairs(redis.call('ZRANGE', checkpoints, 0, math.min(over, at_once) - 1)) do drop(other) end
  end
  local steps = key .. 'steps:' .. string.sub(name, 34)
  redis.call('SET', key .. 'at:' .. name, found, 'PX', math.ceil(seconds * 1000))
  redis.call('SADD', steps, name)
  redis.call('PEXPIRE', steps, longest * 1000)
  lasts(checkpoints, 'CH', name, seconds, longest)
end

function act.renew(name, seconds, longest)
  if redis.call('PEXPIRE', key .. 'at:' .. name, math.ceil(seconds * 1000)) == 0 then return end
  redis.call('PEXPIRE', key .. 'steps:' .. string.sub(name, 34), longest * 1000)
  lasts(checkpoints, 'XX', name, seconds, longest)
end

function act.forget(workflow, at_once)
  local found = {}
  for _, name in ipairs(redis.call('SPOP', key .. 'steps:' .. workflow, at_once)) do
    local raw = redis.call('GET', key .. 'at:' .. name)
    local request = raw and list_of(raw)[2]
    if request then redis.call('DEL', key .. 'of:' .. request) end
    found[#found + 1] = raw or ''
    drop(name)
  end
  return found
end

function act.open(fork, branches, step, request, found, seconds, longest, most, at_once)
  for _, other in ipairs(ended(forks, at_once)) do drop_fork(other) end
  local of, left = key .. 'of:' .. request, key .. 'left:' .. fork
  needed(request)
  if open_as(fork) then return 'known' end
  drop_fork(fork)
  if redis.call('ZCARD', forks) >= tonumber(most) then return 'full' end
  local ms = math.ceil(seconds * 1000)
  for number = 0, branches - 1 do redis.call('SADD', left, number) end
  redis.call('PEXPIRE', left, ms)
  redis.call('SET', key .. 'fork:' .. fork, found, 'PX', ms)
  redis.call('SET', key .. 'asked:' .. fork, cjson.encode({tonumber(branches), step, request}), 'PX', ms)
  lasts(forks, 'CH', fork, seconds, longest)
  lasts(of, 'CH', fork, seconds, longest)
  return 'open'
end

function act.find(fork)
  local told = open_as(fork)
  if not told then return false end
  local left = redis.call('SMEMBERS', key .. 'left:' .. fork)
  return {told[1], told[2], redis.call('GET', key .. 'fork:' .. fork) or '', left}
end

function act.renew_fork(fork, seconds, longest)
  for _, kind in ipairs({'fork:', 'left:', 'asked:'}) do
    redis.call('PEXPIRE', key .. kind .. fork, math.ceil(seconds * 1000))
  end
  lasts(forks, 'XX', fork, seconds, longest)
  local told = asked(fork)
  if told then lasts(key .. 'of:' .. told[3], 'XX', fork, seconds, longest) end
end

function act.leave(fork, number)
  local left = key .. 'left:' .. fork
  if redis.call('SREM', left, number) == 0 then return false end
  if redis.call('SCARD', left) > 0 then return '' end
  local found, told = redis.call('GET', key .. 'fork:' .. fork) or '', asked(fork)
  drop_fork(fork)
  if told and needed(told[3]) then return '' end
  return found
end

return act[ARGV[1]](unpack(ARGV, 2))
"""


class TooManyForks(Exception):
    """The tenant has `MOST_FORKS` forks with open branches."""


class KvCheckpoint(NamedTuple):
    """`request_id`: of the request that left it at the instance. `tokens`: of its prompt and its answer
    that have KV. `step`: as
    `name_of_step` names it; "": an older release stored it."""

    instance: str
    request_id: str
    tokens: int
    lease_s: float
    step: str = ""


class OtherFork(Exception):
    """The fork is there and is another one: `field` of the body is not as it was asked for."""

    def __init__(self, field: str) -> None:
        super().__init__(field)
        self.field = field


class OpenFork(NamedTuple):
    """`open`: the numbers of its branches that have not ended. `found`: None if its checkpoint is gone."""

    open: tuple[int, ...]
    found: KvCheckpoint | None
    lease_s: float


def _key(tenant: str, kind: str, name: str) -> str:
    return f"{STEPS_KEY.format(tenant=tenant)}|{kind}:{name}"


def _run(tenant: str, act: str, *told: str | bytes | float) -> Dialogue[Any]:
    found = yield ("EVAL", _SCRIPT, 1, STEPS_KEY.format(tenant=tenant), act, *told)
    return found


def keep_checkpoint(tenant: str, workflow: str, step: str, found: KvCheckpoint, left_s: float) -> Dialogue[None]:
    """`left_s`: of its lease."""
    name = name_of_step(workflow, step)
    raw = orjson.dumps(list(found._replace(step=name)))
    yield from _run(tenant, "keep", name, raw, left_s, LONGEST_LEASE_S, MOST_CHECKPOINTS, AT_ONCE)


def read_checkpoint(tenant: str, workflow: str, step: str) -> Dialogue[KvCheckpoint | None]:
    raw = yield ("GET", _key(tenant, "at", name_of_step(workflow, step)))
    return _checkpoint(raw)


def forget_checkpoints(tenant: str, workflow: str) -> Dialogue[list[KvCheckpoint]]:
    """Those of a workflow, which nobody needs any more."""
    gone = []
    while some := (yield from _run(tenant, "forget", workflow, AT_ONCE)):
        gone += [found for raw in some if (found := _checkpoint(raw)) is not None]
    return gone


def fork_name(workflow: str, fork_id: str) -> str:
    """Of the client's id: with it begin the names of its branches, which a tenant uses in all its workflows."""
    return f"fork-{sha256(f'{len(workflow)}:{workflow}{fork_id}'.encode()).hexdigest()[:24]}"


def find_fork(tenant: str, fork: str, step: str, branches: int) -> Dialogue[OpenFork | None]:
    """A fork with open branches, whose lease begins again. `step`: the key of the step that it is to go on from. Raises
    OtherFork."""
    raw = yield from _run(tenant, "find", fork)
    if raw is None:
        return None
    if raw[1].decode() != _step(step):
        raise OtherFork("fork_id")
    if raw[0] != branches:
        raise OtherFork("branches")
    found = _checkpoint(raw[2])
    lease_s = found.lease_s if found is not None else _lease_of_the_lost(raw[2])
    if lease_s is None:
        return None
    yield from _run(tenant, "renew_fork", fork, lease_s, LONGEST_LEASE_S)
    return OpenFork(tuple(sorted(map(int, raw[3]))), found, lease_s)


def open_fork(
    tenant: str, fork: str, step: str, branches: int, found: KvCheckpoint, *, gone: bool = False
) -> Dialogue[bool]:
    """Whether there was none with this name. `step`: its key. `gone`: the checkpoint is not at its engine any more, so
    no branch goes on from it. Raises TooManyForks."""
    if not gone:
        yield from renew_step(tenant, found)
    raw = orjson.dumps(found.lease_s if gone else list(found))
    told = (fork, branches, _step(step), found.request_id, raw, found.lease_s, LONGEST_LEASE_S, MOST_FORKS, AT_ONCE)
    answer = yield from _run(tenant, "open", *told)
    if answer == b"full":
        raise TooManyForks
    return bool(answer == b"open")


def lose_checkpoint(tenant: str, fork: str) -> Dialogue[None]:
    """The checkpoint of a fork is gone: further branches are computed. They stay open, as long as before: the lease
    is kept in its place."""
    key = _key(tenant, "fork", fork)
    found = _checkpoint((yield ("GET", key)))
    if found is not None:
        yield ("SET", key, orjson.dumps(found.lease_s), "PX", int(found.lease_s * 1000), "XX")


def join_branch(tenant: str, branch: str) -> Dialogue[KvCheckpoint | None]:
    """Where the checkpoint of a branch is, whose lease begins again. None: the fork has ended or never was, or its
    checkpoint is gone."""
    fork, _, number = branch.rpartition("-")
    if not (yield ("SISMEMBER", _key(tenant, "left", fork), number)):
        return None
    raw = yield ("GET", _key(tenant, "fork", fork))
    found = _checkpoint(raw)
    lease_s = _lease_of_the_lost(raw) if found is None else found.lease_s
    if lease_s is not None:
        yield from _run(tenant, "renew_fork", fork, lease_s, LONGEST_LEASE_S)
    return found


def renew_step(tenant: str, found: KvCheckpoint) -> Dialogue[None]:
    """Its lease has begun again at the engine, so it can be forked as long."""
    if found.step:
        yield from _run(tenant, "renew", found.step, found.lease_s, LONGEST_LEASE_S)


def end_branch(tenant: str, branch: str) -> Dialogue[tuple[bool, KvCheckpoint | None]]:
    """Whether the branch was open, and after the last one of all forks of the checkpoint this, which nobody needs any
    more."""
    fork, _, number = branch.rpartition("-")
    raw = yield from _run(tenant, "leave", fork, number)
    return raw is not None, _checkpoint(raw)


def fork_of(branch: str) -> str:
    """The name of its fork."""
    return branch.rpartition("-")[0]


def _step(key: str) -> str:
    """What a fork remembers of the key of its step."""
    return sha256(key.encode()).hexdigest()[:32]


def _checkpoint(raw: bytes | None) -> KvCheckpoint | None:
    """None too for one that cannot be read, such as another release's."""
    try:
        return KvCheckpoint(*orjson.loads(raw)) if raw else None
    except (orjson.JSONDecodeError, TypeError):
        return None


def _lease_of_the_lost(raw: bytes | None) -> float | None:
    """Of a fork whose checkpoint is gone."""
    try:
        found = orjson.loads(raw) if raw else None
    except orjson.JSONDecodeError:
        return None
    return float(found) if isinstance(found, float | int) and not isinstance(found, bool) else None
