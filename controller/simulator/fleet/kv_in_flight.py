"""What a run remembers of disaggregated requests: a prefill whose KV may move already, and KV on its way."""

from __future__ import annotations

from controller.core.kv_links import KvMoved
from controller.core.steps import Seq
from controller.simulator.fleet.instance import SimulatedInstance


class Prefill:
    """One whose last step has begun. `computed`: it has ended too, which the gateway may not have heard yet."""

    __slots__ = ("computed", "instance", "seq")

    def __init__(self, instance: SimulatedInstance, seq: Seq) -> None:
        self.instance, self.seq, self.computed = instance, seq, False


class Move:
    """One transfer: the sequence as it will go on at `target`. `rest`: bytes that can flow when its prefill has ended
    and the others have."""

    __slots__ = ("began", "moved", "rest", "seq", "size", "source", "target", "waits_since")

    def __init__(self, seq: Seq, source: str, target: str, began: float) -> None:
        self.seq, self.source, self.target, self.began = seq, source, target, began
        self.size = self.rest = 0.0  # bytes
        self.waits_since: float | None = None  # for its prefill
        self.moved: KvMoved | None = None  # how it went, once it landed
