"""`make bench-scaleout`: how long a warm engine takes to its first answer, by where its weights come from.

One engine serves a random model of at least 1 GB; a second one is warm (process up, weights absent). A request waits at
the warm engine while its weights come from disk (page cache dropped for the files), from the copy in host memory that
the serving engine left there when it had read the disk (`--host-copy`), and from the serving engine's memory
(torch.distributed); the digest of every tensor of both is checked. `first_served_s` is from the order
to load to that request's first token; `load_s` is the load alone: meeting, room, transfer, digests. The source answers
throughout; its TPOT is taken alone and during each load. All weights are removed between rounds; sources take turns;
reported are medians.

The warm engine keeps the memory for its weights, touched (`--keep-room`), as a pool with a device for each warm engine
can; with `--room released` it makes it during the load.

The medium's own bandwidth is taken in the same round, once while the source answers as it does during the move
(`link_share` is against this one) and once while it is idle: one raw TCP stream of the same size on the same loopback,
out of and into the processor's caches; and once more while the source answers from memory to memory, which is what
weights must do (`link_share_memory`). With `--device cuda` it is a copy from one device's memory to the other's. There
each engine has a device of its own; with one device the engines share it and nothing moves between them, since NCCL
joins no two processes on one device. The copy in host memory wants twice the model free, in its folder's file system
(`--host-copy`) and in memory; where there is less, that source is left out too. `left_out` says which were, and why.

Prints a table, then one line of JSON: `first_served_s` and `load_s` by source, `ratios` between sources, `link_share`.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import requests

from benchmarks.engines import Engine, reference_engines, stop_on_sigterm
from benchmarks.machine import keep
from benchmarks.medium import device_copy, memory_stream, raw_stream
from benchmarks.shapes import add_shape_options, checked, device_words, devices, write_random
from benchmarks.trials import note
from workers.engine.host_copy import ROOM, room

SOURCES = ("disk", "host", "engine")
PROMPT = list(range(3, 35))
LONG_ANSWER = 40
CONTEXT = 8192
MEMORY = Path("/dev/shm")
NO_COPY = "no copy of the weights for this host's engines"  # as the engine that should write one logs it
ONE_DEVICE = "one CUDA device only, and NCCL joins no two processes on one device"


class Fleet:
    """The serving engine and the warm one."""

    def __init__(self, source: Engine, warm: Engine, token: str, model: str) -> None:
        self.source, self.warm, self.token, self.model = source, warm, token, model

    def empty(self) -> None:
        """The warm engine without weights, and without a copy of its own."""
        _ok(requests.post(f"{self.warm.url}/sleep", params={"level": 2}, json={"token": self.token}, timeout=120))

    def no_copy(self, within_s: float = 120.0) -> str:
        """Waits until the serving engine has written the one for this host's engines; "" then, else why there is none,
        as soon as that engine says so."""
        ends_at = time.monotonic() + within_s
        while not _ok(requests.get(f"{self.warm.url}/weights", timeout=30)).json()["host_copy"]:
            said = [line for line in self.source.log.read_text(errors="replace").splitlines() if NO_COPY in line]
            if said:
                return said[-1][said[-1].index(NO_COPY) :]
            if time.monotonic() > ends_at:
                return f"no copy in host memory within {within_s:g} s"
            time.sleep(0.1)
        return ""

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


class Answering:
    """The source answers one request behind the other while the block runs; `answers`: each one's token times."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.answers: list[list[float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            self.answers.append([])
            self._fleet.first_token_at(self._fleet.source, LONG_ANSWER, self.answers[-1])

    def __enter__(self) -> Answering:
        """Returns when tokens come: what follows happens beside them."""
        self._thread.start()
        while self._thread.is_alive() and (not self.answers or len(self.answers[0]) < 3):
            time.sleep(0.01)
        if not self._thread.is_alive():
            raise RuntimeError(f"{self._fleet.source.url} does not answer; its log: {self._fleet.source.log}")
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


def tpot_ms(answers: Sequence[Sequence[float]], began: float, ended: float) -> float | None:
    """Mean time between tokens of the same answer, of those within `began` to `ended`; None if there are none."""
    gaps = [
        later - sooner for times in answers for sooner, later in pairwise(times) if began <= sooner and later <= ended
    ]
    return 1e3 * statistics.fmean(gaps) if gaps else None


def one_round(fleet: Fleet, kind: str, folder: Path) -> dict[str, float | None]:
    fleet.empty()
    if kind == "disk":
        forget(folder)
    served: list[float] = []
    with Answering(fleet) as answering:
        began = time.monotonic()
        waiting = threading.Thread(target=fleet.first_token_at, args=(fleet.warm, 1, served))
        waiting.start()
        said = fleet.load({"kind": kind, "url": fleet.source.url})
        ended = time.monotonic()
        waiting.join()
    (attempt,) = said["attempts"]
    return {
        "load_s": attempt["seconds"],
        "first_served_s": served[0] - began,
        "bytes": attempt["bytes"],
        "source_tpot_ms": tpot_ms(answering.answers, began, ended),
    }


def while_answering(fleet: Fleet, measure: Callable[[], float]) -> float:
    """What is measured while the source answers requests."""
    with Answering(fleet):
        return measure()


def tpot_alone(fleet: Fleet) -> float:
    times: list[float] = []
    fleet.first_token_at(fleet.source, 20, times)
    return tpot_ms([times], times[0], times[-1]) or 0.0


def forget(folder: Path) -> None:
    """Drop the files from the page cache: a cold start reads the disk."""
    for path in folder.glob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        os.fdatasync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def two_devices(environment: Mapping[str, str]) -> Sequence[str]:
    """The first two that this process may use, as children must name them."""
    return (environment.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")[:2]


def lacks_room(base: Path, size: int, held: int) -> str:
    """Why no copy of so many bytes can lie below `base`, "" if it can. `held`: bytes that engines take of the host's
    memory before it is written."""
    free, wanted = room(base), ROOM * size + held
    if free >= wanted:
        return ""
    return (
        f"a copy of {size / 1e9:.2f} GB wants {wanted / 1e9:.2f} GB free at {base} and in memory: {free / 1e9:.2f} GB"
    )


def engines(args: argparse.Namespace, model: Path, logs: Path, apart: bool, copies: bool) -> Iterator[Any]:
    """The serving and the warm engine; `apart`: each on a device of its own; `copies`: they share one in memory."""
    common = ("--executor", "torch", "--model", str(model), "--served-model-name", "big", "--device", args.device)
    threads = ("--threads", "1") if args.device == "cpu" else ()
    shared = ("--host-copy", str(args.host_copy)) if copies else ()
    timed = ("--profile", "constant:50ms", "--kv-timeout", "120")
    options = (*common, *threads, *shared, "--kv-cache-gib", "0.1", *timed)
    first, second = ({"CUDA_VISIBLE_DEVICES": name} if apart else {} for name in two_devices(os.environ))
    absent = ("--weights", "absent", *(("--keep-room",) if args.room == "kept" else ()))
    with (
        reference_engines(1, logs / "source", *options, environment=first) as [source],
        reference_engines(1, logs / "warm", *options, *absent, environment=second) as [warm],
    ):
        yield source, warm


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    add_shape_options(parser, "half-billion")
    parser.add_argument("--room", choices=["kept", "released"], default="kept", help="for the warm engine's weights")
    where = "folder for the copy in host memory, best in memory (%(default)s); without room there it is left out"
    parser.add_argument("--host-copy", type=Path, default=MEMORY, metavar="DIR", help=where)
    parser.add_argument("--keep", action="store_true", help="write the JSON to docs/measurements/scaleout as well")
    args = parser.parse_args(argv)
    if not args.host_copy.is_dir():
        parser.error(f"--host-copy: {args.host_copy} is not a folder")
    return checked(parser, args, cpu_dtype="bfloat16")


def main() -> None:
    args = parse()
    stop_on_sigterm()
    token = os.environ["FLEET_TOKEN"] = secrets.token_urlsafe(16)
    on_cuda, count = args.device == "cuda", devices(args.device)
    left_out = {"engine": ONE_DEVICE} if on_cuda and count < 2 else {}
    rounds: dict[str, list[dict[str, float | None]]] = {}
    streams: dict[str, list[float]] = {"answering": [], "idle": [], "memory": []}
    with tempfile.TemporaryDirectory(prefix="bench-scaleout-") as name:
        folder = Path(name)
        size = write_random(folder / "model", args.shape, CONTEXT, args.dtype)
        note(f"a model of {size / 1e9:.2f} GB")
        if why := lacks_room(args.host_copy, size, 0 if on_cuda else 2 * size):
            left_out["host"] = why

        def medium() -> float:
            return device_copy(size, "cuda:0", "cuda:1") if on_cuda else raw_stream(size)

        pair = engines(args, folder / "model", folder / "logs", on_cuda and count > 1, "host" not in left_out)
        for source, warm in pair:
            fleet = Fleet(source, warm, token, "big")
            if "host" not in left_out and (why := fleet.no_copy()):
                left_out["host"] = why
            for kind, why in left_out.items():
                note(f"{kind} is left out: {why}")
            sources = tuple(kind for kind in SOURCES if kind not in left_out)
            rounds = {kind: [] for kind in sources}
            alone = tpot_alone(fleet)
            for turn in range(args.rounds):
                at = turn % len(sources)
                for kind in sources[at:] + sources[:at]:
                    rounds[kind].append(one_round(fleet, kind, folder / "model"))
                    note(f"round {turn + 1} {kind}: {rounds[kind][-1]}")
                if "engine" in sources:
                    streams["idle"].append(medium())
                    streams["answering"].append(while_answering(fleet, medium))
                    if not on_cuda:
                        streams["memory"].append(while_answering(fleet, lambda: memory_stream(size)))
    result = summary(rounds, streams, alone, size)
    result |= {
        "shape": args.shape,
        "room": args.room,
        "device": device_words(args.device) or "cpu",
        "dtype": args.dtype,
    }
    result |= {"python": sys.version.split()[0], "left_out": left_out}
    print(table(result))
    print(json.dumps(result))
    if args.keep:
        keep("scaleout", result, device_words(args.device))


def summary(
    rounds: Mapping[str, Sequence[Mapping[str, float | None]]],
    streams: Mapping[str, Sequence[float]],
    alone: float,
    size: int,
) -> dict[str, Any]:
    """What is reported. `streams`: GB/s of the medium while the source answers, while it is idle, and from memory to
    memory while it answers; `alone`: its TPOT, ms; `size`: bytes of the model. Shares of the medium are None where no
    weights moved over it, or it was not taken."""

    def middle(kind: str, key: str) -> float | None:
        values = [each[key] for each in rounds[kind]]
        known = [value for value in values if value is not None]
        return round(statistics.median(known), 4) if known else None

    load = {kind: middle(kind, "load_s") for kind in rounds}
    first = {kind: middle(kind, "first_served_s") for kind in rounds}
    moved = load.get("engine")
    links = {name: statistics.median(found) if found else None for name, found in streams.items()}

    def share(link: float | None) -> float | None:
        return round(size / moved / 1e9 / link, 3) if moved and link else None

    return {
        "first_served_s": first,
        "load_s": load,
        "ratios": {"first_served_s": ratios(first), "load_s": ratios(load)},
        "link_share": share(links["answering"]),
        "link_share_idle": share(links["idle"]),
        "link_share_memory": share(links["memory"]),
        "raw_gb_per_s": {name: link and round(link, 3) for name, link in links.items()},
        "source_tpot_ms": {"alone": round(alone, 2), **{kind: middle(kind, "source_tpot_ms") for kind in rounds}},
        "bytes": size,
        "rounds": min(map(len, rounds.values())),
    }


def ratios(seconds: Mapping[str, float | None]) -> dict[str, float]:
    """How many times as long the first of a pair takes as the second, for every pair: `disk/engine` 2.5."""
    pairs = combinations([(kind, value) for kind, value in seconds.items() if value], 2)
    return {f"{kind}/{other}": round(value / less, 2) for (kind, value), (other, less) in pairs}


def table(result: Mapping[str, Any]) -> str:
    size, load, first, tpot = (result[key] for key in ("bytes", "load_s", "first_served_s", "source_tpot_ms"))
    lines = [f"{size / 1e9:.2f} GB, {result['rounds']} rounds; TPOT of the source alone {tpot['alone']:.1f} ms"]
    lines.append(f"{'source':8} {'load s':>8} {'GB/s':>6} {'first served s':>15} {'source TPOT ms':>15}")
    for kind in load:
        busy = "-" if tpot[kind] is None else f"{tpot[kind]:.1f}"
        lines.append(f"{kind:8} {load[kind]:8.3f} {size / load[kind] / 1e9:6.2f} {first[kind]:15.3f} {busy:>15}")
    for key, of in (("first_served_s", "first served"), ("load_s", "load")):
        said = ", ".join(f"{pair} {ratio:.2f}" for pair, ratio in result["ratios"][key].items())
        lines.append(f"{of}: {said}")
    if result["link_share"] is not None:
        lines.append(
            f"engine to engine: {100 * result['link_share']:.0f} % of the bare medium beside an engine that answers "
            f"({result['raw_gb_per_s']['answering']:.2f} GB/s), {100 * result['link_share_idle']:.0f} % of it idle"
        )
    if result["link_share_memory"] is not None:
        lines.append(
            f"engine to engine: {100 * result['link_share_memory']:.0f} % of a stream from memory to memory beside an "
            f"engine that answers ({result['raw_gb_per_s']['memory']:.2f} GB/s)"
        )
    lines += [f"{kind} left out: {why}" for kind, why in result.get("left_out", {}).items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
