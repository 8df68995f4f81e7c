"""Runs of a load on the testbed and in the simulator's network, and what they come to."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import uvloop

from benchmarks.testbed.daemons import clients, daemons
from benchmarks.testbed.hosts import EmulatedHost
from benchmarks.testbed.serve import LinkedRun, LinkNetwork, PairwiseRun, host_names
from benchmarks.testbed.transport import Transport
from benchmarks.testbed.workload import TARGET, PrefillLoad
from controller.flow.flows import FlowStage
from controller.flow.gate import OFF
from controller.flow.policies import FLOW_POLICIES, FairSharing, FlowPolicy
from controller.simulator.flows.gated import GatedRun
from controller.simulator.flows.prefill import PrefillRequest, ServedPrefill, alone_s
from workers.flowd.client import Flow, FlowClient

ON_TIME = 1e-3  # share of the target by which a first token may be late, as in the reproduction
PATIENCE = 6.0  # how often longer than its arrivals a run may take
LEAST_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class PrefillFigures:
    """Of the counted requests, but `cct_ms` of all exchanges. `attainment`: share in time. `late_ms`: by which the
    latest timer ran late, which is the machine's doing. `unscheduled`: flows that were given up by their schedule."""

    attainment: float
    ttft_s: float
    cct_ms: float
    seconds: float
    late_ms: float = 0.0
    late_p99_ms: float = 0.0
    promotions: int = 0
    held_s: float = 0.0
    unscheduled: Mapping[str, int] | None = None

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def policy_of(name: str) -> FlowPolicy:
    """`off` is what TCP does: about equal shares."""
    return FairSharing() if name == OFF else FLOW_POLICIES[name]()


def simulated(load: PrefillLoad, policy: str, seed: int, gates: bool = True) -> PrefillFigures:
    """The same requests over the simulator's network, with links as fast as the testbed's carry payload and, but for
    `off`, the gate of a daemon on each host that sends. Without `gates` hosts share their links to the byte."""
    run, requests = PairwiseRun(load.settings, lambda: policy_of(policy)), load.requests(seed)
    if gates and policy != OFF:
        run.network = gated_network(load, policy)
    return _figures(load, requests, run.serve(requests), run.collective_s, run.now)


def gated_network(load: PrefillLoad, policy: str) -> GatedRun:
    """Links and daemons of a testbed. A daemon is told the bits of its link; headers take some of them."""
    settings = load.settings
    ports = {f"{host}.{side}": load.shape.port_bytes_per_s for host in host_names(settings) for side in ("out", "in")}
    return GatedRun(
        ports, lambda: policy_of(policy), load.mbit * 1e6 / 8, period_s=settings.period_s, report_s=settings.report_s
    )


def served(
    load: PrefillLoad, policy: str, seed: int, hosts: Mapping[str, EmulatedHost], apart: bool = False
) -> PrefillFigures:
    """One run in real time. `apart`: collectives have links of their own (the second fabric), so that nothing contends
    with them. Raises LinkedRunError, OSError, RuntimeError."""
    senders = [host for name, host in hosts.items() if name.startswith("p")]
    with contextlib.ExitStack() as stack:
        paths = stack.enter_context(daemons(senders, policy, load.mbit)) if policy != OFF else {}
        return uvloop.run(_served(load, seed, hosts, paths, apart))


async def _served(
    load: PrefillLoad, seed: int, hosts: Mapping[str, EmulatedHost], paths: Mapping[str, str], apart: bool
) -> PrefillFigures:
    requests, settings = load.requests(seed), load.settings
    within = LEAST_PATIENCE_S + PATIENCE * requests[-1].at
    units = [f"p{number}" for number in range(load.instances)]
    async with Transport(hosts) as transport, clients(paths, units) as asked:
        network = LinkNetwork(transport, asked, 1 if apart else 0)
        run = LinkedRun(settings, network, FairSharing)
        try:
            found = await run.serve_real(requests, within)
        finally:
            await network.close()
        figures = _figures(load, requests, found, run.collective_s, network.now)
        late = sorted(network.late_s)
        return PrefillFigures(
            figures.attainment, figures.ttft_s, figures.cct_ms, figures.seconds,
            round(1e3 * late[-1], 1), round(1e3 * late[int(0.99 * (len(late) - 1))], 1),
            network.promotions, round(network.held_s, 2), dict(network.unscheduled),
        )  # fmt: skip


def _figures(
    load: PrefillLoad,
    requests: Sequence[PrefillRequest],
    found: Mapping[str, ServedPrefill],
    exchanges: Sequence[float],
    seconds: float,
) -> PrefillFigures:
    counted = requests[load.warm_up :]
    in_time = [found[each.id].ttft_s <= TARGET * alone_s(load.shape, each) * (1 + ON_TIME) for each in counted]
    return PrefillFigures(
        round(sum(in_time) / len(in_time), 4),
        round(statistics.fmean(found[each.id].ttft_s for each in counted), 4),
        round(1e3 * statistics.fmean(exchanges), 2),
        round(seconds, 2),
    )


def uncontended(
    load: PrefillLoad, pairs: int, hosts: Mapping[str, EmulatedHost], policy: str
) -> dict[str, list[float]]:
    """Seconds of single KV transfers of a mean prompt's layers on the idle link, without (`off`) and with the daemon
    (`on`), in turn; neither always goes first."""
    sender, receiver = "p0.0", "d0.0"
    size = round(load.shape.kv_bytes(load.mean))
    with daemons([hosts[sender]], policy, load.mbit) as paths:
        return uvloop.run(_single(size, pairs, hosts, sender, receiver, paths))


async def _single(
    size: int, pairs: int, hosts: Mapping[str, EmulatedHost], sender: str, receiver: str, paths: Mapping[str, str]
) -> dict[str, list[float]]:
    took: dict[str, list[float]] = {"off": [], "on": []}
    async with Transport(hosts) as transport, clients(paths, ["p0"]) as asked:
        for number in range(pairs + 1):
            for mode in sorted(took, reverse=bool(number % 2)):
                client = asked[sender, "p0"] if mode == "on" else None
                began = time.perf_counter()
                await transport.send(sender, receiver, size, _single_flow(client, size, receiver, number))
                if number:  # the first pair makes the connection
                    took[mode].append(time.perf_counter() - began)
                await asyncio.sleep(0.02)
    return took


def _single_flow(client: FlowClient | None, size: int, receiver: str, number: int) -> Flow | None:
    if client is None:
        return None
    return client.submit(FlowStage.KV_TRANSFER, size, receiver, 5.0, f"single {number}", layer=0)


def cost_pct(took: Mapping[str, Sequence[float]]) -> float:
    """How much longer a transfer takes with the daemon: median over pairs, per cent of the median without it."""
    differences = [on - off for on, off in zip(took["on"], took["off"], strict=True)]
    return round(100 * statistics.median(differences) / statistics.median(took["off"]), 2)
