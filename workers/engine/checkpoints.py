"""Checkpoints of an engine under their leases: KV that an answer leaves behind for branches (controller.engine)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Gauge

from controller.core.steps import Release, Seq
from workers.engine.engine import Engine, names_of

LONGEST_LEASE_S = 3_600.0


class CheckpointLeases:
    """`begun`: leases since the start; `branches`: sequences that began from a checkpoint's KV."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._leases: dict[str, tuple[Seq, asyncio.TimerHandle]] = {}
        self.begun = self.branches = 0

    def expose(self, registry: CollectorRegistry) -> None:
        """Add the metrics under Slackline's names, since vLLM has no checkpoints."""
        for name, text, read in (
            ("kv_checkpoints", "Answers whose KV is pinned for branches.", lambda: len(self._kept())),
            ("kv_checkpoint_blocks", "KV blocks that they pin.", lambda: self._engine.scheduler.checkpoints.held),
            ("kv_checkpoints_begun", "Leases of checkpoints, since the start.", lambda: self.begun),
            ("kv_branches", "Sequences that began from a checkpoint's KV, since the start.", lambda: self.branches),
        ):
            Gauge(f"slackline_{name}", text, registry=registry).set_function(read)

    def _kept(self) -> list[Seq]:
        return list(self._engine.scheduler.checkpoints.holders())

    def ended(self, seq: Seq, lease_s: float) -> None:
        """A sequence has been answered: if it left a checkpoint, its lease begins."""
        if seq.origin is not None and seq.cached:
            self.branches += 1
        if not self._engine.scheduler.checkpoints.holds(seq):
            return
        self.begun += 1
        timer = asyncio.get_running_loop().call_later(lease_s, self._release, seq)
        self._leases[seq.id] = (seq, timer)

    def renew(self, name: str, lease_s: float) -> bool:
        """The lease of the checkpoint begins again. False if it is not here any more."""
        found = next((seq for seq in self._kept() if seq.checkpoint == name and seq.id in self._leases), None)
        if found is None:
            return False
        self._leases.pop(found.id)[1].cancel()
        timer = asyncio.get_running_loop().call_later(lease_s, self._release, found)
        self._leases[found.id] = (found, timer)
        return True

    def free(self, names: Iterable[str]) -> int:
        """End checkpoints by the ids of the requests that left them; returns how many. Unknown ids are ignored."""
        wanted = set(names)
        found = [seq for seq in self._kept() if wanted.intersection((seq.checkpoint, *names_of(seq)))]
        for seq in found:
            self._release(seq)
        return len(found)

    def _release(self, seq: Seq) -> None:
        lease = self._leases.pop(seq.id, None)
        if lease is not None:
            lease[1].cancel()
        self._engine.handle(Release(seq))
