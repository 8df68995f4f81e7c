"""Asks the transfer daemon of this host whether a transfer may send now, and never waits for it forever.

Every doubt ends a transfer's schedule, and it goes on unscheduled: no daemon, no answer, a daemon that fell silent, an
expired lease, or more than `MOST_HELD_S` of holding: in total, or of a weight load at once, since its floor lets it go
again and again. `Flow.reason` then says which.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from controller.flow.flows import FlowStage
from controller.flow.gate import OFF
from workers.flowd.lines import line_batches
from workers.small_json import dumps, loads

ANSWER_S = 0.5  # until a submit is answered
SILENCE_S = 3.0  # the daemon says something each second
MOST_HELD_S = 20.0  # of one KV transfer; below the gateway's time-out of a transfer that moves (30 s)
STILL_S = 1.0  # how often a held transfer says so
REPORT_S = 0.05  # between two reports of progress
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
LATE_S = 0.001  # a transfer that is late already counts as due so soon: it cannot be in time, and the policy knows it
NO_TARGET_S = 30.0  # the same, for a transfer of a request without a deadline
MAX_LINE = 4 << 20
QUEUE_S = 0.05  # within which the daemon says what is queued; without an answer nothing is
SCHEDULED = "scheduled"
LINK, MEMORY = "link", "memory"  # what a transfer takes bandwidth of: the host's link, or the memory of the host
log = logging.getLogger(__name__)


class Flow:
    """One transfer. `reason`: SCHEDULED, or why it is not: `unavailable`, `no_answer`, `silent`, `lost`, `expired`,
    `refused`, `held_too_long`, `off` (the flow policy was just switched off). `level`: 1 (most urgent) to 8, 0 if
    unknown. `promotions`: levels it rose by."""

    def __init__(self, client: FlowClient, flow_id: str, size: float, *, held_in_total: bool = True) -> None:
        self.id = flow_id
        self._held_in_total = held_in_total
        self.level = self.promotions = 0
        self.wire_class: int | None = None
        self.held_s = 0.0
        self.reason = SCHEDULED
        self._client = client
        self._left = size
        self._go: bool | None = None
        self._changed = asyncio.Event()
        self._waiting = self._pressed = self._over = False
        self._reported_at = 0.0

    @property
    def left(self) -> float:
        """Bytes not sent yet."""
        return self._left

    @property
    def scheduled(self) -> bool:
        return self.reason == SCHEDULED

    @property
    def may_send(self) -> bool:
        """Whether `turn` would return at once. Any thread may ask."""
        return not self.scheduled or self._go is True

    async def turn(self, still: Callable[[], Awaitable[None]], pressed: Callable[[], bool] = lambda: False) -> None:
        """Return once it may send. While it is held, `still` is called each second; `pressed`: whether memory is short
        here, which makes the transfer the most urgent one. Raises what `still` raises."""
        self.waits(False)
        began = now = self._now()
        said_at, before = began, self.held_s
        while self.scheduled and not self._go:
            if self._go is None and now - began >= ANSWER_S:
                self.unscheduled("no_answer")
                break
            if self.held_s - (0.0 if self._held_in_total else before) >= MOST_HELD_S:
                self.unscheduled("held_too_long")
                break
            if not self._pressed and pressed():
                self._pressed = True
                self._client.say({"op": "urgent", "id": self.id})
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S / 2):
                    await self._changed.wait()
            now = self._now()
            self.held_s = before + now - began
            if now - said_at >= STILL_S:
                said_at = now
                self._report()
                await still()

    async def answered(self) -> None:
        """Return once the daemon has said whether it may send, or it is not scheduled. Has no end by itself."""
        while self.scheduled and self._go is None:
            self._changed.clear()
            await self._changed.wait()

    def sent(self, size: int) -> None:
        """So many more bytes were sent."""
        self._left = max(0.0, self._left - size)
        if self._now() - self._reported_at >= REPORT_S:
            self._report()

    def waits(self, waiting: bool) -> None:
        """Whether there is nothing to send now. Call it again each second: it also renews the lease."""
        if waiting != self._waiting or (waiting and self._now() - self._reported_at >= STILL_S):
            self._waiting = waiting
            self._report()

    def needed_by(self, layer: int) -> None:
        """This layer waits for its next bytes, from 0. Others may go first then, from the next look at `turn` on."""
        self._report(layer=layer)

    def end(self) -> None:
        """It was sent or given up. Idempotent."""
        if not self._over:
            self._over = True
            self._client.ended(self)

    # ---- for the client ---------------------------------------------------------------------------------------------

    def permitted(self, go: bool, level: int, wire_class: int) -> None:
        if self.level and level < self.level:
            self.promotions += self.level - level
        self.level, self.wire_class, self._go = level, wire_class, go
        self._changed.set()

    def unscheduled(self, reason: str) -> None:
        if self.scheduled:
            self.reason = reason
            self._changed.set()
            self._client.ended(self)

    def _report(self, **more: Any) -> None:
        if self.scheduled and not self._over:
            self._reported_at = self._now()
            about = {"id": self.id, "left": self._left, "waiting": self._waiting}
            self._client.say({"op": "progress", **about, **more})

    def _now(self) -> float:
        """Not the loop's time: uvloop's has whole milliseconds, in which a transfer that was held briefly is not."""
        return time.monotonic()


class FlowClient:
    """One connection to the daemon, which is made again when it breaks. `name`: what the
    ids of its flows begin with, unlike those of other clients."""

    def __init__(self, path: str, name: str = "") -> None:
        self._path = path
        self._name = name or secrets.token_hex(6)  # no process id: containers of one host may share theirs
        self._writer: asyncio.StreamWriter | None = None
        self._off = False
        self._flows: dict[str, Flow] = {}
        self._asked: dict[str, asyncio.Future[float]] = {}
        self._unsent: list[bytes] = []
        self._numbers = itertools.count(1)
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
        self._send()
        self._lost("lost")

    @property
    def connected(self) -> bool:
        return self._writer is not None

    @property
    def off(self) -> bool:
        """Whether the daemon said last that the flow policy is `off`: transfers then need not be submitted."""
        return self._off

    def submit(
        self,
        stage: int,
        size: int,
        to: str,
        due_in_s: float | None,
        request: str = "",
        batch: str = "",
        over: str = LINK,
        unit: str = "",
        layer: int | None = None,
        later: float = 0.0,
    ) -> Flow:
        """Announce a transfer of `size` bytes to the host `to`. `due_in_s`: until its last byte is due, None without a
        deadline, as weight loads always are. `batch`: that is computed now and makes or needs the bytes, "" if there
        is none; `unit`: who computes it, "" for this client. `over`: LINK or MEMORY. It is scheduled at once or not at
        all; `end` must follow in any case.

        `layer`: that needs the bytes, or made them, from 0. What a layer needs is due when the layer is: without
        `due_in_s` it has no deadline of its own. `later`: bytes that the request will still submit to leave this host,
        of layers that are not computed yet."""
        weights = stage == FlowStage.WEIGHTS
        flow = Flow(self, f"{self._name}:{next(self._numbers)}", size, held_in_total=not weights)
        if self._writer is None:
            flow.reason = "unavailable"
            return flow
        self._flows[flow.id] = flow
        due = NO_TARGET_S if due_in_s is None else max(due_in_s, LATE_S)
        about: dict[str, Any] = {"stage": stage, "size_bytes": size, "to": to, "over": over}
        if batch:
            about |= {"unit": unit or self._name, "batch": batch}
        if layer is not None:
            about |= {"layer": layer, "later_bytes": later}
        needed = layer is not None and stage in (FlowStage.REUSE, FlowStage.COLLECTIVE)
        if not weights and not (needed and due_in_s is None):
            about |= {"due_in_s": due, "target_in_s": due_in_s}
        self.say({"op": "submit", "id": flow.id, **about, "requests": [request] if request else []})
        return flow

    async def queue_s(self) -> float:
        """Seconds that the host's link takes for all transfers of requests that are queued on it. 0 if the daemon does
        not say."""
        if self._writer is None:
            return 0.0
        name = f"{self._name}:{next(self._numbers)}"
        answer = self._asked[name] = asyncio.get_running_loop().create_future()
        self.say({"op": "queue", "id": name})
        try:
            async with asyncio.timeout(QUEUE_S):
                return await answer
        except TimeoutError:
            return 0.0
        finally:
            del self._asked[name]

    def layer(self, batch: str, layer: int, unit: str = "") -> None:
        """This layer of the batch is computed now, from 0. `unit`: as in `submit`."""
        self.say({"op": "layer", "unit": unit or self._name, "batch": batch, "layer": layer})

    def computed(self, batch: str, unit: str = "") -> None:
        self.say({"op": "computed", "unit": unit or self._name, "batch": batch})

    def say(self, message: dict[str, Any]) -> None:
        """Send it with all else that is said before the event loop goes on: a call of the kernel costs more than
        making the message."""
        if self._writer is None:
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent.append(dumps(message) + b"\n")

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self._writer is not None and not self._writer.is_closing():
            self._writer.write(b"".join(unsent))

    def ended(self, flow: Flow) -> None:
        if self._flows.pop(flow.id, None) is not None:
            self.say({"op": "completion", "id": flow.id, "left": flow.left})

    # ---- the connection ---------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        pause_s, told = SHORTEST_PAUSE_S, False
        while True:
            why = "lost"
            try:
                async with asyncio.timeout(SILENCE_S):
                    reader, writer = await asyncio.open_unix_connection(self._path)
                self._writer, pause_s, told = writer, SHORTEST_PAUSE_S, False
                log.info("transfers are scheduled by the daemon at %s", self._path)
                why = await self._listen(reader)
            except (OSError, ValueError, KeyError, TypeError) as error:  # a TimeoutError too, or not a daemon's words
                why = "silent" if isinstance(error, TimeoutError) and self._writer is not None else "lost"
                if not told:
                    told = True
                    log.warning("no transfer daemon at %s (%s): transfers go unscheduled", self._path, error or why)
            finally:
                self._lost(why)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _listen(self, reader: asyncio.StreamReader) -> str:
        batches = line_batches(reader, MAX_LINE)
        while True:
            async with asyncio.timeout(SILENCE_S):
                lines = await anext(batches, None)
            if lines is None:
                return "lost"
            for line in lines:
                self._heard(loads(line))

    def _heard(self, said: Any) -> None:
        if not isinstance(said, dict):
            return
        if said.get("event") == "policy":
            self._off = said.get("policy") == OFF
        asked = self._asked.get(str(said.get("id", "")))
        if asked is not None and not asked.done():
            asked.set_result(float(said.get("seconds", 0.0)))
        flow = self._flows.get(str(said.get("id", "")))
        if flow is None:
            return
        match said.get("event"):
            case "permit":
                flow.permitted(bool(said["go"]), int(said["level"]), int(said["class"]))
            case "expired" | "off" as reason:
                flow.unscheduled(reason)
            case "error":
                log.warning("the transfer daemon refused %s: %s", flow.id, said.get("message"))
                flow.unscheduled("refused")

    def _lost(self, why: str) -> None:
        writer, self._writer = self._writer, None
        self._unsent.clear()  # the next connection knows none of these transfers
        if writer is not None:
            writer.transport.abort()
        for flow in list(self._flows.values()):
            flow.unscheduled(why)
        self._flows.clear()
