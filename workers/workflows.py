"""When each open workflow is due, in Redis: every gateway sees the same, on Redis' own clock."""

from __future__ import annotations

from typing import NamedTuple

from workers.live import Dialogue

WORKFLOWS_KEY = "slackline:workflows:{tenant}"  # sorted set: workflow ids by the epoch second at which they are due
KEPT_S = 3_600.0  # after it was due: until then a late step is known to be late
MOST_OPEN = 10_000  # of one tenant: a few megabytes

# The first deadline that a workflow is given counts, so that clients can send it with every request.
_JOIN = """
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local due, began = redis.call('ZSCORE', KEYS[1], ARGV[1]), 0
if not due then
  if ARGV[2] == '' then return false end
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[3])
  if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[4]) then return 'full' end
  due, began = now + ARGV[2], 1
  redis.call('ZADD', KEYS[1], string.format('%.6f', due), ARGV[1])
  redis.call('EXPIRE', KEYS[1], 86400 + ARGV[3])
end
return {string.format('%.6f', due - now), began}
"""


class TooManyWorkflows(Exception):
    """The tenant has `MOST_OPEN` workflows that are not over."""


class JoinedWorkflow(NamedTuple):
    """`left_s`: until it is due, negative if it is late. `began`: with this request."""

    left_s: float
    began: bool


def join_workflow(tenant: str, workflow: str, deadline_s: float | None) -> Dialogue[JoinedWorkflow | None]:
    """Begin the workflow, or find out what is left of it, as one atomic step. None: it has no deadline, and none was
    given. Raises TooManyWorkflows."""
    asked = "" if deadline_s is None else f"{deadline_s:.6f}"
    key = WORKFLOWS_KEY.format(tenant=tenant)
    found = yield ("EVAL", _JOIN, 1, key, workflow, asked, str(int(KEPT_S)), str(MOST_OPEN))
    if found is None:
        return None
    if found == b"full":
        raise TooManyWorkflows
    return JoinedWorkflow(float(found[0]), bool(found[1]))
