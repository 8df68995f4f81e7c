"""Responses of /v1/responses that are kept, in Redis among the answers of steps, whose retention and bounds they share.

One that is computed in the background is open until it has ended. Its gateway holds a lease on it meanwhile: an open
one without a lease was left behind by a gateway that died. If it is streamed, its events are kept beside it, as one
value that grows while it is open.
"""

from __future__ import annotations

from typing import NamedTuple

from workers import steps
from workers.live import Dialogue
from workers.steps import LARGEST_BYTES, STEPS_KEY, forget_steps, run_script

OPEN = b'{"open":true'  # how what is kept of an open response begins
LEASE_S = 10.0
MOST_LISTED, LISTED = 100, 20  # items of input in one answer
ORDERS = ("asc", "desc")
EVENTS_BYTES = 2 * LARGEST_BYTES  # of the events of one response, as they are kept
_NO_STEP = "response" + "-" * 24  # in place of a step's hash: no client can name it


def _group(response_id: str) -> str:
    return f"response/{response_id}"


def _name(response_id: str) -> str:
    return f"{_NO_STEP}:{_group(response_id)}"


def _key(tenant: str, response_id: str) -> str:
    return f"{STEPS_KEY.format(tenant=tenant)}|{_name(response_id)}"


def _lease(tenant: str, response_id: str) -> str:
    return f"{_key(tenant, response_id)}|lease"


class KeptEvents(NamedTuple):
    """`state` of their response: `leased` or `open` (without a lease), then `ended`; or `gone`. `size`: bytes of all
    that is kept. `more`: those from where they were asked for."""

    state: str
    size: int
    more: bytes


def read_response(tenant: str, response_id: str) -> Dialogue[tuple[bytes | None, bool]]:
    """What is kept of it, or None; and whether a gateway holds its lease."""
    found = yield ("MGET", _key(tenant, response_id), _lease(tenant, response_id))
    return found[0], found[1] is not None


def keep_response(tenant: str, response_id: str, raw: bytes, retention_s: float) -> Dialogue[str]:
    """As `keep_step`."""
    told = (_name(response_id), raw, retention_s, steps.MOST_STEPS, steps.MOST_BYTES, steps.AT_ONCE)
    found: bytes = yield from run_script(tenant, "keep", *told)
    return found.decode()


def end_response(tenant: str, response_id: str, raw: bytes, retention_s: float) -> Dialogue[str]:
    """In place of what was kept while it was open: `kept`, `known` (it had ended), `gone` (deleted) or `full`, and then
    it is open still. Until there is room for it, others go: each time as many as one script drops."""
    told = (_name(response_id), raw, retention_s, steps.MOST_STEPS, steps.MOST_BYTES, steps.AT_ONCE)
    for _ in range(steps.MOST_STEPS // steps.AT_ONCE + 1):
        found: bytes = yield from run_script(tenant, "replace", OPEN, *told)
        if found != b"full":
            return found.decode()
    return "full"


def renew_response(tenant: str, response_id: str, retention_s: float) -> Dialogue[bool]:
    """Hold its lease for LEASE_S more. Its retention begins anew, so that it neither ends nor makes room for others
    while it is computed. False: it is not open any more."""
    told = (_name(response_id), _lease(tenant, response_id), round(LEASE_S * 1000), retention_s)
    open_still: int = yield from run_script(tenant, "renew", OPEN, *told)
    return bool(open_still)


def forget_response(tenant: str, response_id: str) -> Dialogue[int]:
    """With its events. How many answers were forgotten."""
    gone = yield from forget_steps(tenant, _group(response_id))
    return gone


def extend_events(tenant: str, response_id: str, at: int, more: bytes, retention_s: float) -> Dialogue[str]:
    """Keep `more` bytes of the events of an open response, of which `at` are kept already: `kept`, also if that was
    done before; `full`, `too_large`; or `gone`: the response is not open any more, or its events made room."""
    told = (_name(response_id), at, more, EVENTS_BYTES, retention_s, steps.MOST_STEPS, steps.MOST_BYTES, steps.AT_ONCE)
    found: bytes = yield from run_script(tenant, "extend", OPEN, *told)
    return found.decode()


def read_events(tenant: str, response_id: str, at: int) -> Dialogue[KeptEvents]:
    """`at`: how many bytes of them are known already."""
    told = (_name(response_id), _lease(tenant, response_id), at)
    state, size, more = yield from run_script(tenant, "look", OPEN, *told)
    return KeptEvents(state.decode(), size, more)


def drop_events(tenant: str, response_id: str) -> Dialogue[None]:
    yield from run_script(tenant, "drop_events", _name(response_id))
