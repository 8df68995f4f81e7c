"""A KV transfer that was held and promoted, and whether the first token was in time: by the history of the transfer
daemon, which it reports to Redis, and the record of the request. `make bench-gating` tells one of its real vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import orjson
import psycopg
import redis

from controller.core.messages import HOST_FLOWS_KEY, HostFlow
from controller.flow.flows import FlowStage

_FIRST_TOKENS = "SELECT id, ttft_s, target_ttft_s FROM request_record WHERE id = ANY(%s) AND ttft_s IS NOT NULL"
NONE = "No transfer was promoted and sent before its deadline in this run."


class RecordedFirst(NamedTuple):
    """Seconds from the request's arrival."""

    after_s: float
    target_s: float


def story_of_run(environment: Mapping[str, str]) -> list[str]:
    """`environment`: of the gateway and of the daemon, which has to have reported since the transfers ended."""
    with redis.Redis.from_url(environment["REDIS_URL"]) as client:
        reports = [orjson.loads(each) for each in client.hvals(HOST_FLOWS_KEY)]
    flows: list[HostFlow] = [flow for report in reports for flow in report["flows"]]
    with psycopg.connect(environment["DATABASE_URL"]) as connection:
        rows = connection.execute(_FIRST_TOKENS, [[flow["request"] for flow in flows]]).fetchall()
    return tell(flows, {name: RecordedFirst(after_s, target_s) for name, after_s, target_s in rows})


def tell(flows: Sequence[HostFlow], first_tokens: Mapping[str, RecordedFirst]) -> list[str]:
    """Of the transfer, among those that were promoted and in time, which had the least time left at its end."""
    in_time = [flow for flow in flows if _promoted_in_time(flow) and _first_in_time(flow, first_tokens)]
    if not in_time:
        return [NONE]
    flow = min(in_time, key=_early_s)
    return _story(flow, first_tokens[flow["request"]])


def _early_s(flow: HostFlow) -> float:
    """Of one that has ended: how long before its deadline. Negative if it was late or had none."""
    return -math.inf if flow["due_in_s"] is None else flow["due_in_s"]


def _promoted_in_time(flow: HostFlow) -> bool:
    levels = flow["levels"]
    promoted = bool(levels) and levels[-1][1] < levels[0][1]
    return promoted and flow["stage"] == FlowStage.KV_TRANSFER and flow["end"] == "ended" and _early_s(flow) >= 0


def _first_in_time(flow: HostFlow, first_tokens: Mapping[str, RecordedFirst]) -> bool:
    first = first_tokens.get(flow["request"])
    return first is not None and first.after_s <= first.target_s


def _story(flow: HostFlow, first: RecordedFirst) -> list[str]:
    size, name, early_s = f"{flow['size_bytes'] / 1e6:.2f} MB", flow["request"], _early_s(flow)
    (_, level), *later = flow["levels"]
    changes = ", ".join(f"to level {each} after {after_s:.2f} s" for after_s, each in later)
    return [
        f"Request {name} was due to have its first token {first.target_s:.1f} s after its arrival.",
        f"The transfer of its KV, {size}, was submitted with {early_s + flow['age_s']:.2f} s left, at level {level}.",
        f"As its deadline came near it was promoted {changes}.",
        f"It was held for {flow['held_s']:.2f} s, and was complete after {flow['age_s']:.2f} s, {early_s:.2f} s early.",
        f"The first token came {first.after_s:.2f} s after the request's arrival, which was in time.",
    ]


def as_text(story: Sequence[str]) -> str:
    return "\n".join(["A transfer that was promoted in time:", *(f"  {line}" for line in story)])
