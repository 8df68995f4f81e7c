"""A second host on this machine behind a link of limited bandwidth: a network namespace, a veth pair, and HTB at both
ends.

The link is emulated; sockets, buffers and losses are the kernel's own. Needs root, `ip` and `tc` (Debian's iproute2).
Everything is removed at the end. After a killed process `ip netns list` still shows `slackline-PID`, and `ip netns
delete` removes it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NETWORK = "198.18"  # reserved for network measurements (RFC 2544)
QUANTUM = 60_000  # bytes that HTB lets pass at a time: the default warns at such rates
BURST_S = 1e-3  # share of the rate that may pass at once; with less, the kernel's timer limits the speed
LEAST_BURST = 1 << 16


@dataclass(frozen=True, slots=True)
class SecondHost:
    """`here` and `there`: the addresses of this machine's and the second host's end of the link."""

    name: str
    device: str  # of the link, with the same name at either end
    here: str
    there: str

    @property
    def command(self) -> tuple[str, ...]:
        """The prefix of a command that runs on the second host."""
        return ("ip", "netns", "exec", self.name)

    def cut(self) -> None:
        """Drop everything on the link without telling either side, like a cable pulled beyond the next switch.

        Each side takes the other to be at a hardware address that does not exist.
        """
        nobody = ("lladdr", "02:00:00:00:00:00", "nud", "permanent")
        _run("ip", "neighbour", "replace", self.there, *nobody, "dev", self.device)
        _run(*self.command, "ip", "neighbour", "replace", self.here, *nobody, "dev", self.device)

    def mend(self) -> None:
        """Undo `cut`."""
        _run("ip", "neighbour", "delete", self.there, "dev", self.device)
        _run(*self.command, "ip", "neighbour", "delete", self.here, "dev", self.device)


def network_missing() -> str | None:
    """Why no second host can be made, or None."""
    if absent := [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]:
        return f"{', '.join(absent)} missing (Debian: apt-get install iproute2 util-linux)"
    tried = subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True, text=True)
    return f"no network namespaces: {tried.stderr.strip()}" if tried.returncode else None


@contextmanager
def second_host(gbit: float | None = None) -> Iterator[SecondHost]:
    """`gbit`: Gbit/s of the link in each direction, None: unlimited. Raises RuntimeError."""
    process = os.getpid()
    here, there = (f"{NETWORK}.{process // 64 % 256}.{process % 64 * 4 + end}" for end in (1, 2))
    host = SecondHost(f"slackline-{process}", f"slack{process}", here, there)
    device = ("dev", host.device)
    _run("ip", "netns", "add", host.name)
    try:
        _run("ip", "link", "add", host.device, "type", "veth", "peer", "name", host.device, "netns", host.name)
        for prefix, address in (((), here), (host.command, there)):
            _run(*prefix, "ip", "address", "add", f"{address}/30", *device)
            _run(*prefix, "ip", "link", "set", host.device, "up")
            if gbit is not None:
                _run(*prefix, "tc", "qdisc", "add", *device, "root", "handle", "1:", "htb", "default", "1")
                burst = str(max(LEAST_BURST, round(gbit * 1e9 / 8 * BURST_S)))
                rate = ("htb", "rate", f"{gbit:g}gbit", "quantum", str(QUANTUM), "burst", burst, "cburst", burst)
                _run(*prefix, "tc", "class", "add", *device, "parent", "1:", "classid", "1:1", *rate)
        _run(*host.command, "ip", "link", "set", "lo", "up")
        yield host
    finally:
        # With either end goes the other; with the namespace alone both would go some time later. It may be half made.
        subprocess.run(["ip", "link", "delete", host.device], check=False, capture_output=True)
        _run("ip", "netns", "delete", host.name)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
