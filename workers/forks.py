"""Checkpoints of steps and forks of workflows, in Redis: where the KV of a step is, and which branches go on from it.

Each entry ends with the lease of its checkpoint. The KV is at an engine; here is only who finds it.
"""

from __future__ import annotations

from typing import NamedTuple

import orjson

from workers.live import Dialogue
from workers.steps import STEPS_KEY, name_of_step

LONGEST_LEASE_S = 3_600.0  # that a client may ask for


class KvCheckpoint(NamedTuple):
    """`request_id`: of the request that left it at the instance. `tokens`: of its prompt and its answer
    that have KV. `step`: as
    `name_of_step` names it; "": an older release stored it."""

    instance: str
    request_id: str
    tokens: int
    lease_s: float
    step: str = ""


def _key(tenant: str, kind: str, name: str) -> str:
    """After the bar: what is no name of an answer (`workers.steps`)."""
    return f"{STEPS_KEY.format(tenant=tenant)}|{kind}:{name}"


def keep_checkpoint(tenant: str, workflow: str, step: str, found: KvCheckpoint) -> Dialogue[None]:
    name, of_workflow = name_of_step(workflow, step), _key(tenant, "steps", workflow)
    raw, ms = orjson.dumps(list(found._replace(step=name))), int(found.lease_s * 1000)
    yield ("SET", _key(tenant, "at", name), raw, "PX", ms)
    yield ("SADD", of_workflow, name)
    yield ("PEXPIRE", of_workflow, int(LONGEST_LEASE_S * 1000))


def read_checkpoint(tenant: str, workflow: str, step: str) -> Dialogue[KvCheckpoint | None]:
    raw = yield ("GET", _key(tenant, "at", name_of_step(workflow, step)))
    return _checkpoint(raw)


def forget_checkpoints(tenant: str, workflow: str) -> Dialogue[list[KvCheckpoint]]:
    """Those of a workflow, which nobody needs any more."""
    of_workflow, gone = _key(tenant, "steps", workflow), []
    for name in (yield ("SMEMBERS", of_workflow)):
        at = _key(tenant, "at", name.decode())
        found = _checkpoint((yield ("GET", at)))
        yield ("DEL", at)
        if found is not None:
            gone.append(found)
    yield ("DEL", of_workflow)
    return gone


def open_fork(tenant: str, fork: str, branches: int, found: KvCheckpoint, *, gone: bool = False) -> Dialogue[None]:
    """`gone`: the checkpoint is not at its engine any more, so no branch goes on from it."""
    ms = int(found.lease_s * 1000)
    left = _key(tenant, "left", fork)
    if not gone:
        yield from renew_step(tenant, found)
    yield ("SADD", left, *range(branches))
    yield ("PEXPIRE", left, ms)
    yield ("SET", _key(tenant, "fork", fork), orjson.dumps(found.lease_s if gone else list(found)), "PX", ms)


def lose_checkpoint(tenant: str, branch: str) -> Dialogue[None]:
    """The checkpoint of its fork is gone: further branches are computed. They stay open, as long as before: the lease
    is kept in its place."""
    key = _key(tenant, "fork", branch.rpartition("-")[0])
    found = _checkpoint((yield ("GET", key)))
    if found is not None:
        yield ("SET", key, orjson.dumps(found.lease_s), "PX", int(found.lease_s * 1000))


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
        for kind in ("fork", "left"):
            yield ("PEXPIRE", _key(tenant, kind, fork), int(lease_s * 1000))
    return found


def renew_step(tenant: str, found: KvCheckpoint) -> Dialogue[None]:
    """Its lease has begun again at the engine, so it can be forked as long."""
    if found.step:
        ms = int(found.lease_s * 1000)
        yield ("PEXPIRE", _key(tenant, "at", found.step), ms)
        of_workflow = _key(tenant, "steps", found.step.partition(":")[2])
        yield ("PEXPIRE", of_workflow, int(LONGEST_LEASE_S * 1000))


def end_branch(tenant: str, branch: str) -> Dialogue[tuple[bool, KvCheckpoint | None]]:
    """Whether the branch was open, and after the last one the checkpoint, which nobody needs any more."""
    fork, _, number = branch.rpartition("-")
    left = _key(tenant, "left", fork)
    if not (yield ("SREM", left, number)):
        return False, None
    if (yield ("SCARD", left)):
        return True, None
    found = _checkpoint((yield ("GET", _key(tenant, "fork", fork))))
    yield ("DEL", _key(tenant, "fork", fork))
    return True, found


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
