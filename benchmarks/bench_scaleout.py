"""`make bench-scaleout`: how long a warm engine takes to its first answer, by where its weights come from.

One engine serves a random model of at least 1 GB; a second one is warm (process up, weights absent). A request waits at
the warm engine while its weights come from disk (page cache dropped for the files), from a copy in host memory, and
from the serving engine's memory (torch.distributed, every tensor's digest checked). `first_served_s` is from the order
to load to that request's first token; `load_s` is the load alone: meeting, room, transfer, digests. The medium's own
bandwidth is one raw TCP stream of the same size on the same loopback, in the same round, once while the source answers
as it does during the move (`link_share` is against this one) and once while it is idle. The source's TPOT is taken
alone and during the move. All weights are removed between rounds; sources take turns; reported are medians.

Prints a table, then one line of JSON: `first_served_s` and `load_s` by source, `link_share`, ratios against disk.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import requests

from benchmarks.engines import Engine, reference_engines, stop_on_sigterm
from benchmarks.trials import note

SOURCES = ("disk", "host", "engine")
SHAPE = ("--layers", "9", "--hidden", "2048", "--heads", "16", "--kv-heads", "4", "--vocabulary", "8192")
PIECE = 16 << 20
PROMPT = list(range(3, 35))
LONG_ANSWER = 40


class Fleet:
    """The serving engine and the warm one."""

    def __init__(self, source: Engine, warm: Engine, token: str, model: str) -> None:
        self.source, self.warm, self.token, self.model = source, warm, token, model

    def empty(self, keep_copy: bool) -> None:
        """The warm engine without weights; with a copy in host memory if asked."""
        level, told = {"level": 1 if keep_copy else 2}, {"token": self.token}
        _ok(requests.post(f"{self.warm.url}/sleep", params=level, json=told, timeout=120))

    def fill(self) -> None:
        """From disk, so that there is something to keep a copy of."""
        self.load({"kind": "disk"})

    def load(self, *sources: dict[str, str]) -> dict[str, Any]:
        asked = {"token": self.token, "sources": list(sources)}
        return dict(_ok(requests.post(f"{self.warm.url}/weights/load", json=asked, timeout=600)).json())

    def first_token_at(self, engine: Engine, tokens: int, times: list[float]) -> None:
        """Appends the arrival of every token of one streamed answer."""
        body = {"model": self.model, "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        with requests.post(f"{engine.url}/v1/completions", json=body, stream=True, timeout=600) as response:
            for line in response.iter_lines():
                if line.startswith(b"data: {"):
                    times.append(time.monotonic())


def _ok(response: requests.Response) -> requests.Response:
    if response.status_code != 200:
        raise RuntimeError(f"{response.url} answered {response.status_code}: {response.text[:500]}")
    return response


def one_round(fleet: Fleet, kind: str, folder: Path) -> dict[str, float]:
    if kind == "host":
        fleet.fill()
    fleet.empty(keep_copy=kind == "host")
    if kind == "disk":
        forget(folder)
    busy: list[float] = []
    answering = threading.Thread(target=fleet.first_token_at, args=(fleet.source, LONG_ANSWER, busy))
    answering.start()
    while len(busy) < 3:  # the source answers: what follows happens beside it
        time.sleep(0.01)
    served: list[float] = []
    began = time.monotonic()
    waiting = threading.Thread(target=fleet.first_token_at, args=(fleet.warm, 1, served))
    waiting.start()
    said = fleet.load({"kind": kind, "url": fleet.source.url})
    ended = time.monotonic()
    waiting.join()
    answering.join()
    (attempt,) = said["attempts"]
    during = [at for at in busy if began <= at <= ended]
    return {
        "load_s": attempt["seconds"],
        "first_served_s": served[0] - began,
        "bytes": attempt["bytes"],
        "source_tpot_ms": 1e3 * (during[-1] - during[0]) / (len(during) - 1) if len(during) > 1 else float("nan"),
    }


def while_answering(fleet: Fleet, measure: Callable[[], float]) -> float:
    """What is measured while the source answers a request."""
    busy: list[float] = []
    answering = threading.Thread(target=fleet.first_token_at, args=(fleet.source, LONG_ANSWER, busy))
    answering.start()
    while len(busy) < 3:
        time.sleep(0.01)
    try:
        return measure()
    finally:
        answering.join()


def tpot_alone(fleet: Fleet) -> float:
    times: list[float] = []
    fleet.first_token_at(fleet.source, 20, times)
    return 1e3 * (times[-1] - times[0]) / (len(times) - 1)


def forget(folder: Path) -> None:
    """Drop the files from the page cache: a cold start reads the disk."""
    for path in folder.glob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        os.fdatasync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def raw_stream(size: int) -> float:
    """GB/s of one TCP stream of `size` bytes over loopback, process to process."""
    server = socket.create_server(("127.0.0.1", 0))
    process = multiprocessing.get_context("spawn").Process(target=_pour, args=(server.getsockname()[1], size))
    process.start()
    taken, _ = server.accept()
    room, got = memoryview(bytearray(PIECE)), 0
    began = time.monotonic()
    while count := taken.recv_into(room):
        got += count
    seconds = time.monotonic() - began
    process.join()
    server.close()
    if got != size:
        raise RuntimeError(f"the raw stream brought {got} of {size} bytes")
    return size / seconds / 1e9


def _pour(port: int, size: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as target:
        block = memoryview(bytes(PIECE))
        for left in range(size, 0, -PIECE):
            target.sendall(block[: min(left, PIECE)])


def made(folder: Path) -> int:
    """A random model in `folder`; bytes of its weights."""
    from workers.engine.torch_random import main as make

    make([str(folder), *SHAPE, "--dtype", "bfloat16"])
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def engines(model: Path, logs: Path) -> Iterator[Any]:
    common = ("--executor", "torch", "--model", str(model), "--served-model-name", "big", "--threads", "1")
    options = (*common, "--kv-cache-gib", "0.1", "--profile", "constant:50ms", "--kv-timeout", "120")
    with (
        reference_engines(1, logs / "source", *options) as [source],
        reference_engines(1, logs / "warm", *options, "--weights", "absent") as [warm],
    ):
        yield source, warm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    stop_on_sigterm()
    token = os.environ["FLEET_TOKEN"] = secrets.token_urlsafe(16)
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in SOURCES}
    raw: list[float] = []
    idle: list[float] = []
    with tempfile.TemporaryDirectory(prefix="bench-scaleout-") as name:
        folder = Path(name)
        size = made(folder / "model")
        note(f"a model of {size / 1e9:.2f} GB")
        for source, warm in engines(folder / "model", folder / "logs"):
            fleet = Fleet(source, warm, token, "big")
            alone = tpot_alone(fleet)
            for turn in range(args.rounds):
                for kind in SOURCES[turn % 3 :] + SOURCES[: turn % 3]:
                    rounds[kind].append(one_round(fleet, kind, folder / "model"))
                    note(f"round {turn + 1} {kind}: {rounds[kind][-1]}")
                idle.append(raw_stream(size))
                raw.append(while_answering(fleet, lambda: raw_stream(size)))
    _report(rounds, raw, idle, alone, size)


def _report(
    rounds: dict[str, list[dict[str, float]]], raw: list[float], idle: list[float], alone: float, size: int
) -> None:
    def middle(kind: str, key: str) -> float:
        return round(statistics.median(each[key] for each in rounds[kind]), 4)

    load = {kind: middle(kind, "load_s") for kind in SOURCES}
    first = {kind: middle(kind, "first_served_s") for kind in SOURCES}
    busy = {kind: middle(kind, "source_tpot_ms") for kind in SOURCES}
    link = statistics.median(raw)
    share = size / load["engine"] / 1e9 / link
    print(f"{size / 1e9:.2f} GB, {len(raw)} rounds; one raw TCP stream {link:.2f} GB/s; TPOT alone {alone:.1f} ms")
    print(f"{'source':8} {'load s':>8} {'GB/s':>6} {'first served s':>15} {'disk / this':>12} {'source TPOT ms':>15}")
    for kind in SOURCES:
        print(
            f"{kind:8} {load[kind]:8.3f} {size / load[kind] / 1e9:6.2f} {first[kind]:15.3f} "
            f"{load['disk'] / load[kind]:11.2f}x {busy[kind]:15.1f}"
        )
    share_idle = size / load["engine"] / 1e9 / statistics.median(idle)
    print(
        f"engine to engine: {100 * share:.0f} % of the raw stream, {100 * share_idle:.0f} % of one on an idle machine"
    )
    answer = {
        "first_served_s": first,
        "load_s": load,
        "link_share": round(share, 3),
        "link_share_idle": round(share_idle, 3),
        "raw_gb_per_s": {"answering": round(link, 3), "idle": round(statistics.median(idle), 3)},
        "faster_than_disk": {kind: round(load["disk"] / load[kind], 2) for kind in SOURCES},
        "source_tpot_ms": {"alone": round(alone, 2), **busy},
        "bytes": size,
        "rounds": len(raw),
        "python": sys.version.split()[0],
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
