"""What the transfer daemon tells the console, through Redis: the load of its ports and the history of its flows.

Each second, and more often while KV is sent, it publishes that and reads the stored flow policy in return. Orders of
the coordinator of pruning come as they are published. Without Redis it goes on by the last policy, and orders in force
end.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Protocol

from controller.core.messages import HostFlow, HostFlows, LevelLoad, PortLoad
from controller.core.pruning import PruningOrders
from controller.flow.flows import FlowStage, MsFlow
from controller.flow.gate import FlowView
from workers.live import LiveState, LiveUnavailable, follow
from workers.pruning import VALID_S

PERIOD_S = 1.0
SENDING_S = 0.25  # the same while KV is sent: the coordinator of pruning counts with what is left of it
SHORTEST_WINDOW_S = 0.5  # over which a rate is measured
OPEN_SHOWN, ENDED_SHOWN = 200, 200
log = logging.getLogger(__name__)


class _Seen:
    """One flow. Times of the event loop, in seconds."""

    __slots__ = ("began", "due_at", "end", "ended", "flow", "go", "held_s", "left", "levels", "since")

    def __init__(self, flow: MsFlow, now: float, due_at: float | None) -> None:
        self.flow, self.began, self.since, self.due_at = flow, now, now, due_at
        self.left = float(flow.size_bytes)
        self.go: bool | None = None
        self.held_s = self.ended = 0.0
        self.levels: list[tuple[float, int]] = []
        self.end = ""

    def hold(self, now: float) -> float:
        """Seconds in which it might not send, until now."""
        return self.held_s + (now - self.since if self.go is False else 0.0)


class FlowHistory:
    """The levels and holding times of flows: of all that go on, and of the newest that ended. And the bytes that left
    through each port."""

    def __init__(self) -> None:
        self._moved: dict[str, float] = {}  # since `_rated_at`
        self._rates: dict[str, float] = {}
        self._rated_at = -math.inf
        self._open: dict[str, _Seen] = {}
        self._ended: deque[_Seen] = deque(maxlen=ENDED_SHOWN)

    @property
    def sends_kv(self) -> bool:
        """Whether a transfer from a prefill to a decode instance goes on."""
        return any(seen.flow.stage is FlowStage.KV_TRANSFER for seen in self._open.values())

    def submitted(self, flow: MsFlow, now: float, due_at: float | None) -> None:
        """`due_at`: when it was meant to arrive; the deadline of the flow itself may be a later one."""
        self._open[flow.id] = _Seen(flow, now, due_at)

    def moved(self, flow_id: str, left: float) -> None:
        """So many bytes of it are left."""
        seen = self._open.get(flow_id)
        if seen is not None and left < seen.left:
            self._moved[seen.flow.egress] = self._moved.get(seen.flow.egress, 0.0) + seen.left - max(left, 0.0)
            seen.left = max(left, 0.0)

    def rates(self, ports: Iterable[str], now: float) -> dict[str, float]:
        """Bytes/s through each port, since this was last measured."""
        if now - self._rated_at >= SHORTEST_WINDOW_S:
            passed, self._rated_at = now - self._rated_at, now
            self._rates = {port: moved / passed for port, moved in self._moved.items()}
            self._moved = {}
        return {port: self._rates.get(port, 0.0) for port in ports}

    def told(self, flow_id: str, go: bool, level: int, now: float) -> None:
        seen = self._open.get(flow_id)
        if seen is None:
            return
        seen.held_s = seen.hold(now)
        seen.go, seen.since = go, now
        if not seen.levels or seen.levels[-1][1] != level:
            seen.levels.append((round(now - seen.began, 3), level))

    def over(self, flow_id: str, end: str, now: float) -> None:
        """`end`: "ended" (its bytes were sent, or it was given up), "expired" or "lost"."""
        seen = self._open.pop(flow_id, None)
        if seen is not None:
            seen.held_s = seen.hold(now)
            seen.ended, seen.end = now, "given up" if end == "ended" and seen.left > 0 else end
            self._ended.append(seen)

    def shown(self, views: Iterable[FlowView], now: float) -> Iterator[HostFlow]:
        """Those of `views`, in their order, then the newest that ended."""
        for view in views:
            seen = self._open.get(view["id"])
            if seen is not None:
                yield _as_message(seen, now, view)
        for seen in reversed(self._ended):
            yield _as_message(seen, now)


def _as_message(seen: _Seen, now: float, view: FlowView | None = None) -> HostFlow:
    """`view`: None once it has ended."""
    flow, until = seen.flow, seen.ended if view is None else now
    return {
        "id": flow.id,
        "request": flow.requests[0] if flow.requests else "",
        "stage": int(flow.stage),
        "port": flow.egress,
        "to": flow.ingress.removeprefix("in:"),
        "size_bytes": flow.size_bytes,
        "left_bytes": seen.left,
        "due_in_s": None if seen.due_at is None else seen.due_at - until,
        "go": bool(view and view["go"]),
        "waiting": bool(view and view["waiting"]),
        "rate": view["rate"] if view else 0.0,
        "age_s": until - seen.began,
        "held_s": seen.hold(now) if view else seen.held_s,
        "levels": seen.levels,
        "end": seen.end,
        "ended_s": 0.0 if view else now - seen.ended,
    }


def port_loads(views: Iterable[FlowView], rates: Mapping[str, float]) -> list[PortLoad]:
    """The load of each of these ports (bytes/s), and its queue by level, the most urgent first."""
    levels: dict[str, dict[int, LevelLoad]] = {port: {} for port in rates}
    for view in views:
        of_port = levels[view["port"]]
        level = of_port.setdefault(view["level"], LevelLoad(level=view["level"], flows=0, held=0, left_bytes=0.0))
        level["flows"] += 1
        level["held"] += not view["go"]
        level["left_bytes"] += view["left_bytes"]
    return [
        PortLoad(
            port=port,
            flows=sum(each["flows"] for each in of_port.values()),
            held=sum(each["held"] for each in of_port.values()),
            rate=rates[port],
            levels=[of_port[number] for number in sorted(of_port)],
        )
        for port, of_port in levels.items()
    ]


class Reports(Protocol):
    @property
    def sends_kv(self) -> bool: ...

    def report(self, host: str) -> HostFlows: ...

    def follow(self, policy: str) -> None: ...

    def obey(self, orders: PruningOrders, left_s: float) -> None: ...


async def keep_reporting(daemon: Reports, live: LiveState, host: str, *, away: bool) -> None:
    """Exchange each period until cancelled. `away`: whether Redis was when this was last tried."""
    try:
        while True:
            await asyncio.sleep(SENDING_S if daemon.sends_kv and not away else PERIOD_S)
            away = not await exchange(daemon, live, host, say=not away)
    finally:
        await live.close()


async def keep_obeying(daemon: Reports, live: LiveState) -> None:
    """Pass the orders of the coordinator of pruning on until cancelled. None count for longer than the coordinator's
    do, whatever they say."""

    def obey(orders: PruningOrders) -> None:
        daemon.obey(orders, min(orders.expires_at - live.clock.now(), VALID_S))

    # It is no gateway: no commands come for it, and the flow policy is all that it reads of the configuration.
    await follow(live, lambda command: None, lambda version: None, obey)


async def exchange(daemon: Reports, live: LiveState, host: str, *, say: bool = True) -> bool:
    """Publish once, and follow the stored policy. False if Redis is unavailable, which is logged if `say`."""
    try:
        policy = await live.exchange_flows(daemon.report(host))
    except LiveUnavailable as error:
        if say:
            log.warning("nothing is reported, and the policy stays as it is: %s", error)
        return False
    if policy is not None:
        daemon.follow(policy)
    return True


def first(views: list[FlowView]) -> list[FlowView]:
    """Those that a report shows."""
    return list(islice(views, OPEN_SHOWN))
