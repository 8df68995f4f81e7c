"""A flow of a multi-stage transfer (MFS sec. 3.1): what moves, between which ports, and what waits for it.

Bytes, seconds on one monotonic clock, bytes/s. A port is one direction of one host's link to the network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from controller.core.errors import ConfigError


class FlowStage(IntEnum):
    """What a flow is for. The first three are MFS' stages of a prefill; weights are ours."""

    REUSE = 1  # KV of a cached prefix comes to the prefill instance
    COLLECTIVE = 2  # activations between the devices of one prefill instance; its next layer waits for them
    KV_TRANSFER = 3  # KV goes from the prefill to the decode instance (the paper's P2D)
    WEIGHTS = 4  # a weight load; no request waits for it


STAGES = tuple(FlowStage)


@dataclass(frozen=True, slots=True)
class MsFlow:
    """One flow as it is submitted.

    - `unit`: the prefill instance whose computing waits for the flow or makes it; its batches run one after the other.
    - `batch`, `requests`: whom it serves. A scavenger is a flow all of whose requests were pruned.
    - `layer`: the layer that consumes it (stages 1 and 2), from 0. Of a KV transfer the layer that made it.
    - `deadline`: when the last byte is due (KV transfers). None: the deadline is implicit.
    - `later_bytes`: what the same request will still submit for the same port, of layers that are not computed yet.
    - `singles`: how many single flows of equal size it stands for, as the bytes of a collective on one port do. It
      shares a port like all of them.

    Raises ConfigError with the field that is wrong.
    """

    id: str
    stage: FlowStage
    size_bytes: float
    egress: str
    ingress: str
    unit: str = ""
    batch: str = ""
    requests: tuple[str, ...] = ()
    layer: int = 0
    deadline: float | None = None
    later_bytes: float = 0.0
    singles: int = 1

    def __post_init__(self) -> None:
        if not self.id:
            raise ConfigError("a flow needs an id", field="id")
        if self.stage not in STAGES:
            raise ConfigError(
                f"unknown stage {self.stage!r}; valid: {', '.join(map(str, map(int, STAGES)))}", field="stage"
            )
        if not (self.size_bytes > 0 and math.isfinite(self.size_bytes)):
            raise ConfigError(f"size_bytes must be positive and finite, not {self.size_bytes!r}", field="size_bytes")
        if self.later_bytes < 0:
            raise ConfigError("later_bytes must not be negative", field="later_bytes")
        if self.singles < 1:
            raise ConfigError("singles must be at least 1", field="singles")
        if self.layer < 0:
            raise ConfigError("layer must not be negative", field="layer")
        if not (self.egress and self.ingress):
            raise ConfigError("a flow needs two ports", field="egress" if not self.egress else "ingress")
        if self.stage is FlowStage.KV_TRANSFER and self.deadline is None:
            raise ConfigError("a KV transfer needs the time by which its last byte is due", field="deadline")
        if self.deadline is not None and not math.isfinite(self.deadline):
            raise ConfigError("deadline must be finite", field="deadline")
        if self.stage in (FlowStage.REUSE, FlowStage.COLLECTIVE) and not (self.unit and self.batch):
            raise ConfigError(
                "what a layer waits for needs its unit and batch", field="unit" if not self.unit else "batch"
            )
