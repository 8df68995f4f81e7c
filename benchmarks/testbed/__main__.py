"""`make testbed`: make the hosts and their switch, check what the links do, and remove everything.

Checks that a link carries its rate, and that a transfer of the first class goes before one of the last, where both
leave one host and where both go to one host. `--keep` holds the hosts until Ctrl-C, for commands with `ip netns exec`.
Last line: JSON. Needs root, `ip` and `tc`; without them it says so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
from collections.abc import Mapping
from typing import Any

import uvloop

from benchmarks.load.trials import note
from benchmarks.servers.engines import stop_on_sigterm
from benchmarks.testbed.hosts import CLASSES, EmulatedHost, hosts_missing, hosts_on_a_switch
from benchmarks.testbed.transport import Transport
from benchmarks.testbed.workload import PAYLOAD

NAMES = ("a", "b", "c")
SECONDS = 0.5  # of a transfer alone on the link


async def _took(transport: Transport, source: str, target: str, size: int, wire_class: int | None) -> float:
    began = time.perf_counter()
    await transport.send(source, target, size, wire_class=wire_class)
    return time.perf_counter() - began


async def links(hosts: Mapping[str, EmulatedHost], mbit: float) -> dict[str, Any]:
    """`payload_mbit` of one link, and seconds of two transfers at once, of the first and the last class."""
    size, last = round(SECONDS * mbit * 1e6 / 8 * PAYLOAD), CLASSES - 1
    async with Transport(hosts) as transport:
        for source, target in (("a", "b"), ("a", "c"), ("c", "b")):
            await transport.send(source, target, size // 4)  # connections find out what the links carry
        alone = await _took(transport, "a", "b", size, None)
        leaving = await asyncio.gather(_took(transport, "a", "b", size, 0), _took(transport, "a", "c", size, last))
        arriving = await asyncio.gather(_took(transport, "a", "b", size, 0), _took(transport, "c", "b", size, last))
    return {
        "mbit": mbit,
        "payload_mbit": round(size * 8e-6 / alone, 2),
        "alone_s": round(alone, 3),
        "leaving_s": {"first": round(leaving[0], 3), "last": round(leaving[1], 3)},
        "arriving_s": {"first": round(arriving[0], 3), "last": round(arriving[1], 3)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0, help="Mbit/s of each link (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="hold the hosts until Ctrl-C")
    args = parser.parse_args()
    stop_on_sigterm()
    if (missing := hosts_missing()) is not None:
        note(f"skipped: {missing}")
        print(json.dumps({"skipped": missing}))
        return
    with hosts_on_a_switch(NAMES, args.mbit) as hosts:
        for host in hosts.values():
            note(f"{host.name}: {host.addresses[0]}, {' '.join(host.command)} ...")
        found = uvloop.run(links(hosts, args.mbit))
        if args.keep:
            note("Ctrl-C removes them")
            try:
                signal.pause()
            except KeyboardInterrupt:
                note("removed")
    for where in ("leaving", "arriving"):
        first, last = found[f"{where}_s"].values()
        print(f"{where} one host at once: class 0 {first} s, class 7 {last} s (alone {found['alone_s']} s)")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
