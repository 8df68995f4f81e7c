"""Recorded KV transfers again, under each flow policy: who would have been in time on the links that they shared.

Each transfer is ready when it began, and is a flow from its source's host to its target's over their links alone, in a
fluid network with exact events. Computing is not simulated: a transfer that would have come earlier changes nothing
else, and a weight load or other traffic on the links is not there. As in production a host orders what it sends, and a
receiving port knows the classes of packets alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from controller.flow.flows import FlowStage, MsFlow
from controller.flow.gate import GATED
from controller.flow.policies import FLOW_POLICIES
from controller.simulator.flows.run import PlannedFlow, run_flows


class RecordedTransfer(NamedTuple):
    """`at`, `due`: when it began and had to be there, seconds on one clock. `source`, `target`: hosts."""

    id: str
    at: float
    due: float
    size_bytes: float
    source: str
    target: str


class ReplayedPolicy(NamedTuple):
    """`in_time`: transfers that ended by their deadline. `mean_s`, `p95_s`: from their start to their end."""

    policy: str
    in_time: int
    mean_s: float
    p95_s: float


def replay_transfers(transfers: Sequence[RecordedTransfer], bandwidth: float) -> list[ReplayedPolicy]:
    """`bandwidth`: bytes/s of each direction of each host's link. Transfers within a host use no link and are left out
    by the caller. Empty without transfers."""
    if not transfers:
        return []
    hosts = {name for each in transfers for name in (each.source, each.target)}
    ports = {f"{way}:{host}": bandwidth for host in hosts for way in ("out", "in")}
    plan = [PlannedFlow(each.at, _flow(each)) for each in transfers]
    return [
        _outcome(policy, transfers, run_flows(plan, ports, FLOW_POLICIES[policy], by_class=True)) for policy in GATED
    ]


def _flow(each: RecordedTransfer) -> MsFlow:
    return MsFlow(
        id=each.id,
        stage=FlowStage.KV_TRANSFER,
        size_bytes=each.size_bytes,
        egress=f"out:{each.source}",
        ingress=f"in:{each.target}",
        unit=each.source,
        batch=each.id,
        requests=(each.id,),
        deadline=each.due,
    )


def _outcome(policy: str, transfers: Sequence[RecordedTransfer], ends: dict[str, float]) -> ReplayedPolicy:
    took = sorted(ends[each.id] - each.at for each in transfers)
    in_time = sum(ends[each.id] <= each.due for each in transfers)
    p95_s = took[min(len(took) - 1, int(0.95 * len(took)))]
    return ReplayedPolicy(policy, in_time, sum(took) / len(took), p95_s)
