"""Results of tool steps that clients asked to be kept, in Redis among the answers of steps, whose retention and bounds
they share.

What equal tool steps share is a pointer by the tool's name and the digest of its input, to the step that has the
result. So a result that is forgotten with its workflow is forgotten for all.
"""

from __future__ import annotations

from hashlib import sha256

import orjson

from workers import steps
from workers.live import Dialogue
from workers.steps import STEPS_KEY, read_step, run_script

_KIND = "tool " + "-" * 27  # in place of a step's hash: no client can name it
_MARK = b'{"tool":'  # how a pointer begins


def step_of(key: str) -> str:
    """The name under which the result of a tool step is kept. No call can have it as its key, since names of clients
    have no NUL."""
    return f"\0tool {key}"


def _pointer(name: str, digest: str) -> str:
    asked = sha256(orjson.dumps((name, digest))).hexdigest()
    return f"{_KIND}:tool/{asked}"


def read_shared(tenant: str, name: str, digest: str) -> Dialogue[bytes | None]:
    """What is kept of a tool step with this name and input that lets others have its result. None too if the pointer
    cannot be read, such as another release's."""
    raw = yield ("GET", f"{STEPS_KEY.format(tenant=tenant)}|{_pointer(name, digest)}")
    if raw is None:
        return None
    try:
        workflow, key = orjson.loads(raw)["tool"]
    except (KeyError, TypeError, ValueError):
        return None
    return (yield from read_step(tenant, workflow, step_of(key)))


def share_tool(tenant: str, name: str, digest: str, workflow: str, key: str, retention_s: float) -> Dialogue[None]:
    """The step's result is that of equal ones from now on."""
    raw = orjson.dumps({"tool": (workflow, key)})
    told = (_pointer(name, digest), raw, retention_s, steps.MOST_STEPS, steps.MOST_BYTES, steps.AT_ONCE)
    if (yield from run_script(tenant, "keep", *told)) == b"known":
        yield from run_script(tenant, "replace", _MARK, *told)
