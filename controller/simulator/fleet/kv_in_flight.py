"""State of disaggregated requests in a run: prefills whose KV may already move, and KV transfers."""

from __future__ import annotations

from controller.core.kv_links import KvMoved
from controller.core.steps import Seq
from controller.simulator.fleet.instance import SimulatedInstance


class Prefill:
    """A prefill whose last step has begun. `computed`: it has ended, which the gateway may not know yet."""

    __slots__ = ("computed", "instance", "seq")

    def __init__(self, instance: SimulatedInstance, seq: Seq) -> None:
        self.instance, self.seq, self.computed = instance, seq, False


class Move:
    """One KV transfer.

    `seq`: the sequence as it will continue at `target`. `rest`: bytes that can move only after the prefill has ended
    and the others have moved.
    """

    __slots__ = ("began", "landed", "moved", "rest", "seq", "size", "source", "target", "waits_since")

    def __init__(self, seq: Seq, source: str, target: str, began: float) -> None:
        self.seq, self.source, self.target, self.began = seq, source, target, began
        self.size = self.rest = 0.0  # bytes
        self.waits_since: float | None = None  # waiting for its prefill
        self.landed = False  # before its first token was reported
        self.moved: KvMoved | None = None  # its figures, once it landed
