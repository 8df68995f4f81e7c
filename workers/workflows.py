"""When each open workflow is due, in Redis: every gateway sees the same, on Redis' own clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workers.live import Dialogue

WORKFLOWS_KEY = "slackline:workflows:{tenant}"  # sorted set: workflow ids by the epoch second at which they are due
KEPT_S = 3_600.0  # after it was due, as long as there is room: until then a late step is known to be late
MOST_OPEN = 10_000  # of one tenant: a few megabytes
AT_ONCE = 128  # requests in one script, which holds Redis up for less than a millisecond

# The first deadline that a workflow is given counts, so that clients can send it with every request.
_JOIN = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local kept, most, found = ARGV[1], tonumber(ARGV[2]), {}
for index, key in ipairs(KEYS) do
  local workflow, asked = ARGV[2 * index + 1], ARGV[2 * index + 2]
  local due = redis.call('ZSCORE', key, workflow)
  if due then
    found[index] = {string.format('%.6f', due - now), 0}
  elseif asked == '' then
    found[index] = false
  else
    redis.call('ZREMRANGEBYSCORE', key, '-inf', now - kept)
    if redis.call('ZCARD', key) >= most then
      redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
    end
    if redis.call('ZCARD', key) >= most then
      found[index] = 'full'
    else
      redis.call('ZADD', key, string.format('%.6f', now + asked), workflow)
      redis.call('EXPIRE', key, 86400 + kept)
      found[index] = {asked, 1}
    end
  end
end
return found
"""


class TooManyWorkflows(Exception):
    """The tenant has `MOST_OPEN` workflows that are not due yet."""


class StepOfWorkflow(NamedTuple):
    """A request of a workflow. `deadline_s`: of the whole workflow, if the request names one."""

    tenant: str
    workflow: str
    deadline_s: float | None


class JoinedWorkflow(NamedTuple):
    """`left_s`: until it is due, negative if it is late. `began`: with this request."""

    left_s: float
    began: bool


def join_workflows(steps: Sequence[StepOfWorkflow]) -> Dialogue[list[JoinedWorkflow | TooManyWorkflows | None]]:
    """Begin each step's workflow, or find out what is left of it, all as one atomic step. None: it has no deadline, and
    none was given."""
    keys = [WORKFLOWS_KEY.format(tenant=step.tenant) for step in steps]
    told: list[str] = [str(int(KEPT_S)), str(MOST_OPEN)]
    for step in steps:
        told += [step.workflow, "" if step.deadline_s is None else f"{step.deadline_s:.6f}"]
    found = yield ("EVAL", _JOIN, len(keys), *keys, *told)
    return [_joined(each) for each in found]


def _joined(found: list[bytes] | bytes | None) -> JoinedWorkflow | TooManyWorkflows | None:
    if found is None:
        return None
    if found == b"full":
        return TooManyWorkflows()
    return JoinedWorkflow(float(found[0]), bool(found[1]))
