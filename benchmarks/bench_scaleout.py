"""`make bench-scaleout`: time until a warm spare answers its first request, by the source of its weights.

One engine serves a random model of at least 1 GB. A second one is a warm spare. A request waits at the spare while its
weights are loaded from disk (with the page cache of the files dropped), from the copy in host memory that the serving
engine made when it read the disk (`--host-copy`), or from the serving engine's memory (torch.distributed). The digest
of every tensor is compared. `first_served_s` is from the order to load to the first token of that request; `load_s` is
the load alone: connection, memory, transfer, digests. The serving engine answers requests throughout; its TPOT is
measured alone and during each load. All weights are removed between rounds, and sources alternate; the results are
medians. The spare keeps touched memory for its weights (`--keep-room`), as in a pool with a device for each spare; with
`--room released` it allocates memory during the load.

The bandwidth of the medium is measured in the same round: one raw TCP stream of the same size on the same loopback, out
of and into the processor's caches, once while the serving engine answers as it does during the transfer (`link_share`
refers to this one) and once while it is idle; and once more while it answers, from memory to memory, as weights have to
move (`link_share_memory`).

With `--device cuda` the medium is a copy from one device's memory to the other's, and each engine has a device of its
own. On a machine with one device the engines share it. NCCL does not join two processes on one device, so there the
weights move from the device to the host, over loopback and back to the device, and the medium is the raw TCP stream.
`medium` names it. `device_gb_per_s` is how fast the device copies to and from pinned memory of the host.

The copy in host memory needs twice the size of the model, in its folder's file system (`--host-copy`) and in memory;
without that, this source is left out. `left_out` names it and the reason.

On loopback the medium is the processor and its memory, which the engines use too. With `--link-gbit 10` the engines are
on two hosts (`benchmarks.machine.network`: namespaces, and an emulated link of that bandwidth), and the medium is that
link. Hosts share no copy in memory, so `host` is left out. Prints a table, then one line of JSON: `first_served_s` and
`load_s` by source, `ratios` between sources, `link_share`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import requests

from benchmarks.load.trials import note
from benchmarks.machine.names import keep
from benchmarks.machine.network import SecondHost, network_missing, second_host
from benchmarks.scaleout.medium import device_copy, memory_stream, raw_stream
from benchmarks.scaleout.report import summary, table
from benchmarks.servers.engines import LOOPBACK, RunningEngine, reference_engines, stop_on_sigterm
from benchmarks.servers.shapes import add_shape_options, checked, device_words, devices, random_model
from workers.actions.fleet_calls import call_fleet
from workers.engine.weights.host_copy import ROOM, room

SOURCES = ("disk", "host", "engine")
PROMPT = list(range(3, 35))
LONG_ANSWER = 40
CONTEXT = 8192
MEMORY = Path("/dev/shm")
NO_COPY = "could not write a copy of the weights"  # as logged by the engine that should write the copy
TWO_HOSTS = "the engines are on two hosts"
MEDIA = {  # by whether the two engines have devices of their own, share one, or have none
    "apart": "copy from device to device",
    "shared": "TCP on loopback, between copies from and to the device that both engines share",
    "none": "TCP",
}


class ScaleoutFleet:
    """The serving engine and the warm spare."""

    def __init__(self, source: RunningEngine, warm: RunningEngine, token: str, model: str) -> None:
        self.source, self.warm, self.token, self.model = source, warm, token, model

    def empty(self) -> None:
        """The spare without weights and without a copy of its own."""
        _ok(call_fleet("POST", self.warm.url, "/sleep", self.token, params={"level": 2}, timeout=120))

    def no_copy(self, within_s: float = 120.0) -> str:
        """Wait until the serving engine has written the copy for this host's engines. "" if it has, otherwise the
        reason.
        """
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
        asked = {"sources": list(sources)}
        return dict(_ok(call_fleet("POST", self.warm.url, "/weights/load", self.token, body=asked, timeout=600)).json())

    def first_token_at(self, engine: RunningEngine, tokens: int, times: list[float]) -> None:
        """Append the arrival of every token of one streamed answer."""
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
    """The source answers one request after the other while the block runs. `answers`: the token times of each."""

    def __init__(self, fleet: ScaleoutFleet) -> None:
        self._fleet = fleet
        self.answers: list[list[float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            self.answers.append([])
            self._fleet.first_token_at(self._fleet.source, LONG_ANSWER, self.answers[-1])

    def __enter__(self) -> Answering:
        """Returns once tokens arrive, so that the block runs beside them."""
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
    """Mean time between tokens of the same answer, within `began` to `ended`; None if there are none."""
    gaps = [
        later - sooner for times in answers for sooner, later in pairwise(times) if began <= sooner and later <= ended
    ]
    return 1e3 * statistics.fmean(gaps) if gaps else None


def one_round(fleet: ScaleoutFleet, kind: str, folder: Path) -> dict[str, float | None]:
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


def while_answering(fleet: ScaleoutFleet, measure: Callable[[], float]) -> float:
    """A measurement taken while the source answers requests."""
    with Answering(fleet):
        return measure()


def tpot_alone(fleet: ScaleoutFleet) -> float:
    times: list[float] = []
    fleet.first_token_at(fleet.source, 20, [])  # the first answer of an engine is slow
    fleet.first_token_at(fleet.source, 20, times)
    return tpot_ms([times], times[0], times[-1]) or 0.0


def forget(folder: Path) -> None:
    """Drop the files from the page cache, so that a cold start reads the disk."""
    for path in folder.glob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        os.fdatasync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def two_devices(environment: Mapping[str, str]) -> Sequence[str]:
    """The first two devices that this process may use, as child processes have to name them."""
    return (environment.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")[:2]


def lacks_room(base: Path, size: int, held: int) -> str:
    """Why no copy of so many bytes fits below `base`, "" if it does.

    `held`: bytes of host memory that engines use before.
    """
    free, wanted = room(base), ROOM * size + held
    if free >= wanted:
        return ""
    return (
        f"a copy of {size / 1e9:.2f} GB wants {wanted / 1e9:.2f} GB free at {base} and in memory: {free / 1e9:.2f} GB"
    )


@contextmanager
def engines(
    args: argparse.Namespace, model: Path, logs: Path, apart: bool, copies: bool, other: SecondHost | None
) -> Iterator[Any]:
    """The serving engine and the warm spare.

    `apart`: each on a device of its own. `copies`: they share a copy in memory. `other`: the host of the serving one.
    """
    common = ("--executor", "torch", "--model", str(model), "--served-model-name", "big", "--device", args.device)
    threads = ("--threads", "1") if args.device == "cpu" else ()
    shared = ("--host-copy", str(args.host_copy)) if copies else ()
    timed = ("--profile", "constant:50ms", "--kv-timeout", "120")
    options = (*common, *threads, *shared, "--kv-cache-gib", "0.1", *timed)
    first, second = ({"CUDA_VISIBLE_DEVICES": name} if apart else {} for name in two_devices(os.environ))
    absent = ("--weights", "absent", *(("--keep-room",) if args.room == "kept" else ()))
    there, here, before = (other.there, other.here, other.command) if other else (LOOPBACK, LOOPBACK, ())
    with (
        reference_engines(1, logs / "source", *options, environment=first, host=there, before=before) as [source],
        reference_engines(1, logs / "warm", *options, *absent, environment=second, host=here) as [warm],
    ):
        yield source, warm


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    add_shape_options(parser, "half-billion")
    parser.add_argument(
        "--room", choices=["kept", "released"], default="kept", help="for the weights of the warm spare"
    )
    where = "folder of the copy in host memory, preferably in memory (%(default)s); without room the copy is left out"
    parser.add_argument("--host-copy", type=Path, default=MEMORY, metavar="DIR", help=where)
    gbit = "run the engines on two hosts with a link of this bandwidth between them (needs root, iproute2)"
    parser.add_argument("--link-gbit", type=float, metavar="GBIT", help=gbit)
    parser.add_argument("--keep", action="store_true", help="write the JSON to docs/measurements/scaleout as well")
    args = parser.parse_args(argv)
    if args.link_gbit is not None and not 0 < args.link_gbit < math.inf:
        parser.error("--link-gbit: a number above 0")
    if args.link_gbit is not None and (why := "for engines on the CPU" * (args.device != "cpu") or network_missing()):
        parser.error(f"--link-gbit: {why}")
    if not args.host_copy.is_dir():
        parser.error(f"--host-copy: {args.host_copy} is not a folder")
    return checked(parser, args, cpu_dtype="bfloat16")


class Streams:
    """Raw bandwidth of the medium between the two engines, GB/s."""

    def __init__(self, fleet: ScaleoutFleet, size: int, medium: str, other: SecondHost | None) -> None:
        """`medium`: a key of `MEDIA`."""
        self._fleet, self._size, self._kind = fleet, size, medium
        self._way = (other.here, other.command) if other else ()
        self.found: dict[str, list[float]] = {"answering": [], "idle": [], "memory": []}

    def take(self) -> None:
        self.found["idle"].append(self._medium())
        self.found["answering"].append(while_answering(self._fleet, self._medium))
        if self._kind == "none":
            self.found["memory"].append(while_answering(self._fleet, lambda: memory_stream(self._size, *self._way)))

    def _medium(self) -> float:
        if self._kind == "apart":
            return device_copy(self._size, "cuda:0", "cuda:1")
        return raw_stream(self._size, *self._way)


def measured(args: argparse.Namespace, folder: Path, other: SecondHost | None, token: str) -> dict[str, Any]:
    """All rounds, with one pair of engines."""
    on_cuda, count = args.device == "cuda", devices(args.device)
    left_out: dict[str, str] = {}
    medium = ("apart" if count > 1 else "shared") if on_cuda else "none"
    model, size = random_model(args, folder / "model", CONTEXT)
    note(f"a model of {size / 1e9:.2f} GB")
    if why := TWO_HOSTS if other else lacks_room(args.host_copy, size, 0 if on_cuda else 2 * size):
        left_out["host"] = why
    pair = engines(args, model, folder / "logs", medium == "apart", "host" not in left_out, other)
    with pair as (source, warm):
        fleet = ScaleoutFleet(source, warm, token, "big")
        note("both engines are ready")
        if "host" not in left_out and (why := fleet.no_copy()):
            left_out["host"] = why
        for kind, why in left_out.items():
            note(f"{kind} is left out: {why}")
        sources = tuple(kind for kind in SOURCES if kind not in left_out)
        rounds: dict[str, list[dict[str, float | None]]] = {kind: [] for kind in sources}
        streams, alone = Streams(fleet, size, medium, other), tpot_alone(fleet)
        for turn in range(args.rounds):
            at = turn % len(sources)
            for kind in sources[at:] + sources[:at]:
                rounds[kind].append(one_round(fleet, kind, model))
                note(f"round {turn + 1} {kind}: {rounds[kind][-1]}")
            streams.take()
        ways = {"to_host": ("cuda:0", "cpu"), "to_device": ("cpu", "cuda:0")} if on_cuda else {}
        copies = {name: round(device_copy(size, *way), 2) for name, way in ways.items()}
    extra = {"left_out": left_out, "medium": MEDIA[medium], "device_gb_per_s": copies}
    return summary(rounds, streams.found, alone, size) | extra


def main() -> None:
    args = parse()
    stop_on_sigterm()
    token = os.environ["FLEET_TOKEN"] = secrets.token_urlsafe(16)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-scaleout-")))
        other = stack.enter_context(second_host(args.link_gbit)) if args.link_gbit else None
        result = measured(args, folder, other, token)
    result |= {
        "shape": args.shape,
        "room": args.room,
        "device": device_words(args.device) or "cpu",
        "dtype": args.dtype,
        "link": f"{args.link_gbit:g} Gbit/s, emulated" if args.link_gbit else "loopback",
        "python": sys.version.split()[0],
    }
    print(table(result))
    print(json.dumps(result))
    if args.keep:
        words = [device_words(args.device), f"link {args.link_gbit:g} gbit" if args.link_gbit else ""]
        keep("scaleout", result, " ".join(filter(None, words)))


if __name__ == "__main__":
    main()
