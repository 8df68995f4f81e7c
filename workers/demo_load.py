"""Demo traffic of `make up`: requests of several tenants and classes through the gateway.

It is an open loop: arrivals do not wait for answers. The rate rises and falls slowly, with a short burst every
BURST_EVERY_S that is high enough for the scaler to act. Start it with `python -m workers.demo_load`; DEMO_LOAD=0 keeps
`make up` from starting it. API keys are read from DATA_DIR/credentials.json. It takes a few percent of a core, and
waits while the gateway is unreachable.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from workers.environment import read_variable

log = logging.getLogger("demo-load")

WAVE_PERIOD_S = 180.0
BURST_EVERY_S, BURST_LASTS_S, BURST_AFTER_S = 150.0, 15.0, 60.0
MOST_IN_FLIGHT = 300
REQUEST_TIMEOUT_S = 120.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0
REPORT_EVERY_S = 60.0
WORDS = [
    "the",
    "engine",
    "answers",
    "each",
    "request",
    "in",
    "time",
    "while",
    "queue",
    "grows",
    "and",
    "scaler",
    "adds",
    "one",
]


@dataclass(frozen=True, slots=True)
class TrafficKind:
    """One kind of request. `share`: of all requests; `words`, `tokens`: ranges of prompt words and output tokens;
    `slo`: SLO fields of the body."""

    tenant: str
    share: float
    words: tuple[int, int]
    tokens: tuple[int, int]
    slo: Mapping[str, Any]
    stream: bool = True
    chat: bool = True


@dataclass(frozen=True, slots=True)
class DemoPace:
    """Requests/s: between `low` and `high` along a wave of WAVE_PERIOD_S, and `burst` for BURST_LASTS_S at a time."""

    low: float
    high: float
    burst: float

    def rate(self, seconds: float) -> float:
        """Requests/s, `seconds` after the start."""
        if (seconds - BURST_AFTER_S) % BURST_EVERY_S < BURST_LASTS_S and seconds >= BURST_AFTER_S:
            return self.burst
        swing = (1 - math.cos(2 * math.pi * seconds / WAVE_PERIOD_S)) / 2
        return self.low + (self.high - self.low) * swing


def pick(kinds: list[TrafficKind], rng: random.Random) -> TrafficKind:
    return rng.choices(kinds, weights=[kind.share for kind in kinds])[0]


def body(kind: TrafficKind, model: str, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Path and JSON of one request."""
    text = " ".join(rng.choices(WORDS, k=rng.randint(*kind.words)))
    common = {"model": model, "max_tokens": rng.randint(*kind.tokens), "stream": kind.stream, **kind.slo}
    if kind.chat:
        return "/v1/chat/completions", {**common, "messages": [{"role": "user", "content": text}]}
    return "/v1/completions", {**common, "prompt": text}


class DemoLoad:
    """Sends requests until cancelled, and logs the number of each outcome."""

    def __init__(
        self, url: str, model: str, keys: Mapping[str, str], kinds: list[TrafficKind], pace: DemoPace, seed: int
    ) -> None:
        self.url, self.model, self.keys, self.pace = url, model, keys, pace
        self.kinds = [kind for kind in kinds if kind.tenant in keys]
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.running: set[asyncio.Task[None]] = set()
        self.away = False

    async def run(self) -> None:
        began = reported = time.monotonic()
        pause = FIRST_PAUSE_S
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)) as session:
            while True:
                now = time.monotonic()
                if now - reported > REPORT_EVERY_S:
                    reported = now
                    self._report()
                if self.away:
                    await asyncio.sleep(pause)
                    pause = min(LONGEST_PAUSE_S, pause * 2)
                    self.away = False
                else:
                    pause = FIRST_PAUSE_S if self.counts["200"] else pause
                    await asyncio.sleep(self.rng.expovariate(self.pace.rate(now - began)))
                self._send(session)

    def _send(self, session: aiohttp.ClientSession) -> None:
        if len(self.running) >= MOST_IN_FLIGHT:
            self.counts["skipped"] += 1
            return
        task = asyncio.create_task(self._one(session, pick(self.kinds, self.rng)))
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    async def _one(self, session: aiohttp.ClientSession, kind: TrafficKind) -> None:
        path, content = body(kind, self.model, self.rng)
        headers = {"Authorization": f"Bearer {self.keys[kind.tenant]}"}
        try:
            async with session.post(self.url + path, json=content, headers=headers) as answer:
                async for _ in answer.content.iter_any():
                    continue
                self.counts[str(answer.status)] += 1
        except aiohttp.ClientConnectorError:
            self.away = True
            self.counts["away"] += 1
        except (aiohttp.ClientError, TimeoutError) as error:
            self.counts[type(error).__name__] += 1

    def _report(self) -> None:
        counts = " ".join(f"{name}:{count}" for name, count in sorted(self.counts.items()))
        log.info("last minute %s; in flight %d", counts or "nothing", len(self.running))
        self.counts.clear()


def demo_keys(credentials: Mapping[str, Any]) -> dict[str, str]:
    """API key by tenant: of all demo tenants if `seed_demo` stored them, else the one key of tenant `demo`."""
    keys = credentials.get("keys")
    if isinstance(keys, dict) and keys:
        return dict(keys)
    return {"demo": credentials["api_key"]}


KINDS = [
    TrafficKind("demo", 0.40, (20, 80), (20, 60), {"slo_class": "interactive"}),
    TrafficKind("acme", 0.25, (60, 300), (40, 120), {"slo_class": "standard"}),
    TrafficKind("acme", 0.10, (20, 60), (10, 30), {"priority": 0}),
    TrafficKind("demo", 0.10, (40, 120), (20, 60), {"target_ttft": 1.0, "target_tbt": 0.1}),
    TrafficKind("research", 0.15, (300, 900), (120, 300), {"slo_class": "batch"}, stream=False, chat=False),
]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m workers.demo_load", description=__doc__)
    parser.add_argument("--url", default=read_variable(os.environ, "GATEWAY_URL") or "http://127.0.0.1:8080")
    parser.add_argument(
        "--credentials", type=Path, default=Path(read_variable(os.environ, "DATA_DIR") or ".data", "credentials.json")
    )
    parser.add_argument("--low", type=float, default=1.0, help="lowest rate of the wave, requests/s (%(default)s)")
    parser.add_argument("--high", type=float, default=4.0, help="highest rate of the wave, requests/s (%(default)s)")
    parser.add_argument("--burst", type=float, default=15.0, help="rate of a burst, requests/s (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    credentials = json.loads(args.credentials.read_text())
    pace = DemoPace(args.low, args.high, args.burst)
    load = DemoLoad(args.url, credentials["model"], demo_keys(credentials), KINDS, pace, args.seed)
    asyncio.run(load.run())


if __name__ == "__main__":
    main()
