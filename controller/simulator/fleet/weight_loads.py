"""Weights of new instances from another one's memory: transfers that share its port with KV and with each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from controller.scale.weight_sources import Holder, Path, plan_sources
from controller.simulator.fleet.presence import fleet_of
from controller.simulator.fleet.run import FleetRun
from controller.simulator.heap import EventKind
from controller.simulator.network import GIGA, NetworkTransfer
from controller.simulator.settings import ElasticSettings


class WeightLoads:
    """`up`: what happens with an instance that has its weights."""

    def __init__(self, settings: ElasticSettings, run: FleetRun, up: Callable[[str], None]) -> None:
        self._gb = settings.weights_gb
        self._load_s = settings.load_s
        self._run = run
        self._up = up

    @property
    def moves(self) -> bool:
        """Whether loads are transfers, rather than a time."""
        return self._gb is not None

    def begin_in_time(self, name: str, at: float) -> None:
        """Load so that it serves at `at` if the links are idle and wide enough, or as soon as it can after that."""
        now = self._run.heap.now
        self._run.heap.push(max(now, at - self._load_s["device"]), EventKind.FAILURE, partial(self.begin, name))

    def begin(self, name: str) -> None:
        """Load now from the instance that production would choose, and from the disk if there is none."""
        run, now = self._run, self._run.heap.now
        if name not in run.cluster.starting or self._gb is None:
            return  # its order was cancelled
        source = self._source(name)
        if source is None:
            run.heap.push(now + self._load_s["disk"], EventKind.FAILURE, partial(self._up, name))
            return
        alone_s = self._load_s["device"]
        transfer = NetworkTransfer(
            _transfer(name), source, name, self._gb * GIGA, pace_gb_s=self._gb / alone_s if alone_s else None
        )
        run.links.send(transfer, partial(self._up, name), partial(self.begin, name))

    def cancel(self, name: str) -> None:
        self._run.links.cancel(_transfer(name))

    def _source(self, name: str) -> str | None:
        """The simulated instances have a host each, and any of them can copy from any other of its model."""
        run, now = self._run, self._run.heap.now
        fleet, model, ports = fleet_of(run, now), run.cluster.model_of(name), run.links.ports
        holders, paths = [], []
        for each in run.cluster:
            known, gone = fleet.get(each.id), each.id in run.cluster.draining or ports.dead(each.id, now)
            if each.spec.model == model and known is not None and not gone:
                sends = run.links.network.loads_from(each.id)
                holders.append(Holder(each.id, "", each.id, known.utilisation, sends))
                paths.append(Path(each.id, name, min(ports.gb_s(each.id), ports.gb_s(name)) * GIGA))
        return plan_sources(name, holders, paths, target_host=name).choices[0].id or None


def _transfer(name: str) -> str:
    return f"weights of {name}"
