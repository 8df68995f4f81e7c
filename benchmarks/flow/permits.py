"""How long a transfer waits for its first permit: a real transfer daemon, and one client that submits at a rate.

Each transfer ends as soon as it is told whether it may send, so the link is never the limit. Both processes take
processor time of the same machine. The client runs on the event loop of engines. Beside it, the same for lines that a
process sends back at once (`echo`): less than that no daemon can take.

`python -m benchmarks.flow.permits` measures both in turn and prints, as its last line, JSON: milliseconds by run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence

import uvloop

from benchmarks.flow.echo import MAX_LINE
from controller.flow.flows import FlowStage
from workers.flowd.client import FlowClient
from workers.flowd.lines import line_batches

SIZE = 100_000
LINE = b"x" * 150 + b"\n"  # as long as a submit
START_S = 20.0


async def _at_rate(rate: float, seconds: float, one: Callable[[], Awaitable[None]]) -> list[float]:
    """Seconds that each `one` took."""
    took: list[float] = []

    async def timed() -> None:
        began = time.perf_counter()
        await one()
        took.append(time.perf_counter() - began)

    gc.freeze()  # as engines do
    began, submitted = time.perf_counter(), 0
    # Tasks that have ended are let go: with all of them kept, the garbage collector would hold up the rest.
    async with asyncio.TaskGroup() as group:
        while (passed := time.perf_counter() - began) < seconds:
            for _ in range(round(passed * rate) - submitted):
                group.create_task(timed())
                submitted += 1
            await asyncio.sleep(0.001)  # the least that uvloop waits
    return took


async def _submit(path: str, rate: float, seconds: float) -> list[float]:
    """From each submit to its first permit. Raises RuntimeError if one is not scheduled."""
    client = FlowClient(path)
    client.start()
    async with asyncio.timeout(START_S):
        while not client.connected:
            await asyncio.sleep(0.01)

    async def one() -> None:
        flow = client.submit(FlowStage.KV_TRANSFER, SIZE, "other-host", 1.0)
        await flow.answered()
        if not flow.scheduled:
            raise RuntimeError(f"a transfer was not scheduled: {flow.reason}")
        flow.end()

    try:
        return await _at_rate(rate, seconds, one)
    finally:
        client.close()


async def _send_lines(path: str, rate: float, seconds: float) -> list[float]:
    """From each line to its echo."""
    reader, writer = await asyncio.open_unix_connection(path)
    waiting: deque[asyncio.Future[None]] = deque()

    async def listen() -> None:
        async for lines in line_batches(reader, MAX_LINE):
            for _ in lines:
                waiting.popleft().set_result(None)

    async def one() -> None:
        echoed = asyncio.get_running_loop().create_future()
        waiting.append(echoed)
        writer.write(LINE)
        await echoed

    listening = asyncio.create_task(listen())
    try:
        return await _at_rate(rate, seconds, one)
    finally:
        listening.cancel()
        writer.close()


@contextlib.contextmanager
def _serving(path: str, *module: str, **environment: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-m", *module], env={**os.environ, **environment})
    try:
        deadline = time.monotonic() + START_S
        while not os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(0.02)
        yield
    finally:
        process.terminate()
        process.wait(10.0)


def permit_seconds(rate: float, seconds: float, policy: str = "mfs") -> list[float]:
    """Sorted."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the path of a Unix socket must be short
        path = f"{folder}/flowd.sock"
        with _serving(path, "workers.flowd", FLOW_POLICY=policy, FLOW_SOCKET=path):
            return sorted(uvloop.run(_submit(path, rate, seconds)))


def echo_seconds(rate: float, seconds: float) -> list[float]:
    """Sorted."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = f"{folder}/echo.sock"
        with _serving(path, "benchmarks.flow.echo", path):
            return sorted(uvloop.run(_send_lines(path, rate, seconds)))


def milliseconds(took: Sequence[float], percent: int) -> float:
    """A percentile of sorted seconds."""
    return round(1e3 * took[int(percent / 100 * (len(took) - 1))], 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=2_000.0, help="transfers a second")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--runs", type=int, default=1)
    args = parser.parse_args()
    figures: dict[str, list[float]] = {}
    for _ in range(args.runs):
        for name, measure in (("permit", permit_seconds), ("echo", echo_seconds)):
            took = measure(args.rate, args.seconds)
            for percent in (50, 99):
                figures.setdefault(f"{name}_p{percent}_ms", []).append(milliseconds(took, percent))
            print(f"{name:6} {len(took)} at {args.rate:g}/s: {milliseconds(took, 50)} ms median, ", end="")
            print(f"{milliseconds(took, 99)} ms at p99")
    print(json.dumps({**figures, "rate": args.rate, "seconds": args.seconds}))


if __name__ == "__main__":
    main()
