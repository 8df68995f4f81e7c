"""The source's side of flow scheduling: between two layers a KV transfer asks whether it may go on (`workers.flowd`).

Bytes in the kernel cannot be called back, so the connection of a scheduled transfer keeps few of them that are unsent.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from controller.core.steps import Seq
from controller.flow.flows import FlowStage
from controller.flow.gate import OFF
from workers.engine.engine import names_of
from workers.engine.kv.progress import KvProgress
from workers.engine.kv.wire import KvTransferError, as_class, drained, write_frame
from workers.flowd.client import SCHEDULED, Flow, FlowClient

UNSENT_BYTES = 128 << 10
LOOK_S = 0.002  # how often a step with a transfer is looked at


@dataclass(slots=True)
class HeldTraffic:
    """Of all transfers that this engine sent: seconds that they were held, levels that they rose by, and how many of
    them went unscheduled although there should have been a daemon."""

    held_s: float = 0.0
    promotions: int = 0
    unscheduled: int = 0


class LayerStarts:
    """Tells the daemon which layer a step computes, while KV of the step is transferred. Nothing reports passed layers,
    so they are polled. `layers`: of the model."""

    def __init__(self, client: FlowClient, progress: KvProgress, layers: int) -> None:
        self._client, self._progress, self._layers = client, progress, layers
        self._followed: dict[int, asyncio.Task[None]] = {}

    def follow(self, seq: Seq) -> str:
        """The batch that computes this sequence now, which is reported from now on; "" if it is computed."""
        step_id = self._progress.running(seq)
        if step_id is None:
            return ""
        if step_id not in self._followed:
            following = asyncio.get_running_loop().create_task(self._report(seq, step_id))
            self._followed[step_id] = following
            following.add_done_callback(lambda _: self._followed.pop(step_id, None))
        return str(step_id)

    async def _report(self, seq: Seq, step_id: int) -> None:
        told = -1
        while self._progress.running(seq) == step_id:
            layer = min(self._progress.layers_done(step_id), self._layers - 1)
            if layer > told:
                told = layer
                self._client.layer(str(step_id), layer)
            await asyncio.sleep(LOOK_S)
        self._client.computed(str(step_id))


@dataclass(slots=True)
class ComputedThere:
    """Passes on to the daemon which layer another engine computes of a prompt whose prefix is copied to it, and which
    layer the next bytes are for: of two copies, the one goes first whose layer is needed sooner (MFS' relative layer
    index).

    The unit is the prompt itself, since that engine computes others while this one waits for a layer.
    """

    client: FlowClient
    flow: Flow
    unit: str
    batch: str
    _layer: int | None = None  # None: it has not begun

    @property
    def wanted(self) -> bool:
        """Whether the daemon makes use of it."""
        return self.flow.scheduled

    def computes(self, layer: int) -> None:
        """Layers only ever rise."""
        self._layer = layer
        self.again()

    def again(self) -> None:
        """Say it again, or the daemon would take a prompt that waits for long for one that is computed."""
        if self._layer is not None and self.wanted:
            self.client.layer(self.batch, self._layer, self.unit)

    def sends(self, layer: int) -> None:
        self.again()
        self.flow.needed_by(layer)

    def over(self) -> None:
        if self._layer is not None:
            self.client.computed(self.batch, self.unit)


@dataclass(slots=True)
class TurnsConfig:
    """`client`: None without a transfer daemon. `pressed`: whether memory is short here. `renew`: keep the KV of the
    sequence longer, since its transfer is held. `layers`: reports which layer computes."""

    client: FlowClient | None = None
    pressed: Callable[[], bool] = lambda: False
    renew: Callable[[Seq], None] = lambda seq: None
    traffic: HeldTraffic = field(default_factory=HeldTraffic)
    layers: LayerStarts | None = None

    def begin(self, seq: Seq, size: int, asked: dict[str, Any], writer: asyncio.StreamWriter) -> Turns:
        """`asked`: what the receiver said: `due_in_s` and `pressed`, which engines of older versions do not say."""
        if self.client is None or self.client.off or size <= 0:
            return Turns(self, seq, None, writer)
        due_in_s = _due(asked)
        to = str(writer.get_extra_info("peername")[0])
        batch = self.layers.follow(seq) if self.layers is not None else ""
        flow = self.client.submit(FlowStage.KV_TRANSFER, size, to, due_in_s, names_of(seq)[1], batch)
        return Turns(self, seq, flow, writer, pressed_there=asked.get("pressed") is True)

    def begin_reuse(self, seq: Seq, size: int, asked: dict[str, Any], writer: asyncio.StreamWriter) -> Turns:
        """The same for a prefix that another engine reuses. `asked`: also `unit` and `batch`, by which that engine
        calls itself and the request, and whether its prefill `overlaps` with the copy. Without that it waits for all
        of it, and all layers are as urgent as the first."""
        unit, batch = str(asked.get("unit", ""))[:200], str(asked.get("batch", ""))[:200]
        if self.client is None or self.client.off or size <= 0 or not unit or not batch:
            return Turns(self, seq, None, writer)
        to = str(writer.get_extra_info("peername")[0])
        unit = f"{unit}/{batch}"
        flow = self.client.submit(FlowStage.REUSE, size, to, _due(asked), batch, batch, unit=unit)
        there = ComputedThere(self.client, flow, unit, batch) if asked.get("overlaps") is True else None
        return Turns(self, seq, flow, writer, pressed_there=asked.get("pressed") is True, there=there)

    async def queue_s(self) -> float:
        """Seconds that the host's link takes for what is queued on it; 0 if no daemon says so."""
        return 0.0 if self.client is None or self.client.off else await self.client.queue_s()


def _due(asked: dict[str, Any]) -> float | None:
    """Seconds until the receiver needs it; None if it did not say so."""
    due = asked.get("due_in_s")
    return float(due) if isinstance(due, int | float) and -1e6 < due < 1e6 else None


class Turns:
    """Of one transfer. `flow`: None without flow scheduling; then nothing here waits or writes. `there`: of a copy with
    which the other engine's prefill overlaps."""

    def __init__(
        self,
        config: TurnsConfig,
        seq: Seq,
        flow: Flow | None,
        writer: asyncio.StreamWriter,
        *,
        pressed_there: bool = False,
        there: ComputedThere | None = None,
    ) -> None:
        self.there = there
        self._config = config
        self._seq = seq
        self._flow = flow
        self._writer = writer
        self._pressed_there = pressed_there
        self._class: int | None = None
        if flow is not None and flow.scheduled:
            writer.transport.set_write_buffer_limits(0)
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)

    async def next(self, gone: Callable[[], bool], layer: int | None = None) -> dict[str, int]:
        """Return once the next layer may be sent, with what its frame says of the class of its packets. While it is
        held the receiver is told so each second. `layer`: that this is, for `there`. Raises KvTransferError if it is
        `gone`."""
        flow = self._flow
        if flow is None:
            return {}

        async def still() -> None:
            if gone() or self._writer.is_closing():
                raise KvTransferError(f"the receiver of {self._seq.id} went away", "cut")
            write_frame(self._writer, {"computing": False, "held": True, **self.figures()})
            await drained(self._writer)
            self._config.renew(self._seq)
            if self.there is not None:
                self.there.again()

        if self.there is not None and layer is not None:
            self.there.sends(layer)
        await drained(self._writer)  # what is held must not lie in front of what may go
        await flow.turn(still, lambda: self._pressed_there or self._config.pressed())
        if flow.wire_class is None or flow.wire_class == self._class:
            return {}
        self._class = flow.wire_class
        as_class(self._writer, self._class)
        return {"class": self._class}

    def sent(self, size: int) -> None:
        if self._flow is not None:
            self._flow.sent(size)

    def waits(self) -> None:
        """There is nothing to send: others may."""
        if self._flow is not None:
            self._flow.waits(True)

    def figures(self) -> dict[str, Any]:
        """For the receiver, whose figures become the transfer's record."""
        flow = self._flow
        if flow is None:
            return {}
        return {"held_s": flow.held_s, "promotions": flow.promotions, "level": flow.level, "flow": flow.reason}

    def end(self) -> None:
        """Call in any case."""
        flow, traffic = self._flow, self._config.traffic
        if flow is None:
            return
        flow.end()
        if self.there is not None:
            self.there.over()
        traffic.held_s += flow.held_s
        traffic.promotions += flow.promotions
        traffic.unscheduled += flow.reason not in (SCHEDULED, OFF)
        if self._class is not None:
            self._class = None
            if not self._writer.is_closing():
                as_class(self._writer, None)
