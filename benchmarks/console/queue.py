"""What a long queue costs while somebody watches it: the gateway's tick, the console's picture, a browser's frame.

The real dispatcher, feed and mirror in one process, joined by the JSON that travels between theirs. CPU times.
"""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import orjson

from api.openai.publisher import TICK_S
from api.openai.state.queue_feed import QueueFeed
from console.live.queue_mirror import QueueMirror
from console.live.queue_view import RowWindow, ids_in, queue_frame
from controller.core import events as ev
from controller.core.types import InstanceSpec, Request, Targets
from controller.dispatch import build_dispatcher

WAITING = 10_000
MOVES = 50  # come and go in each tick: 200 requests/s
TICKS = 80
MODEL = "constant"
IN_VIEW = RowWindow(offset=WAITING // 2, limit=40)


def queue_costs(waiting: int = WAITING) -> dict[str, Any]:
    """CPU milliseconds a tick, shares of a core at four ticks a second, sizes in kB; `start_ms`: a first watcher."""
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([ev.InstanceUp(InstanceSpec("full", MODEL, max_num_seqs=1))], 0.0)
    dispatcher.handle([ev.Arrived(_request(number, 0.0)) for number in range(waiting)], 0.0)
    feed, mirror = QueueFeed("gateway", dispatcher, time.time()), QueueMirror()
    began = time.process_time()
    asyncio.run(feed.start())
    whole = orjson.dumps(feed.whole({}, 1))
    start_s = time.process_time() - began
    mirror.take_whole(orjson.loads(whole), time.time())
    spent = {"gateway": 0.0, "console": 0.0, "browser": 0.0}
    told = framed = 0
    for tick in range(TICKS):
        now, first = (tick + 1) * TICK_S, tick * MOVES
        leaving = [ev.Cancelled(f"r{number}") for number in range(first + 1, first + 1 + MOVES)]
        coming = [ev.Arrived(_request(waiting + first + number, now)) for number in range(MOVES)]
        dispatcher.handle([*leaving, *coming], now)
        times = [time.process_time()]
        message = orjson.dumps(feed.changes({MODEL: MOVES / TICK_S}))
        times.append(time.process_time())
        mirror.take(orjson.loads(message), time.time())
        times.append(time.process_time())
        frame = orjson.dumps(queue_frame(mirror, IN_VIEW, ids_in(mirror, IN_VIEW)))
        times.append(time.process_time())
        for name, took in zip(spent, (b - a for a, b in pairwise(times)), strict=True):
            spent[name] += took
        told, framed = told + len(message), framed + len(frame)
    if mirror.behind or len(mirror) != len(dispatcher.queue()):
        raise RuntimeError("the picture is not the queue")
    return {
        "waiting": len(dispatcher.queue()),
        "changes_per_s": round(2 * MOVES / TICK_S),
        "gateway_tick_ms": round(1e3 * spent["gateway"] / TICKS, 2),
        "gateway_pct": round(100 * spent["gateway"] / TICKS / TICK_S, 2),
        "console_tick_ms": round(1e3 * spent["console"] / TICKS, 2),
        "browser_frame_ms": round(1e3 * spent["browser"] / TICKS, 2),
        "message_kb": round(told / TICKS / 1024, 1),
        "frame_kb": round(framed / TICKS / 1024, 1),
        "whole_kb": round(len(whole) / 1024),
        "start_ms": round(1e3 * start_s, 1),
    }


def _request(number: int, arrival: float) -> Request:
    targets = Targets(60.0 + number % 7, 0.1, None, 3600.0)
    return Request(f"r{number}", arrival, targets, 100, 50, MODEL, tenant="acme", slo_class=f"class-{number % 3}")
