"""Addresses by which other hosts reach this one, as the Linux kernel lists them."""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

MOST = 64
LOCAL = "/32 host LOCAL"  # follows an IPv4 address of this host


def own_addresses(listed: Path = Path("/proc/net")) -> tuple[str, ...]:
    """Without those that other hosts have as well (loopback, link-local); at most 64. None where the kernel lists
    none."""
    found: set[str] = set()
    with suppress(OSError):
        lines = (listed / "fib_trie").read_text().splitlines()
        found.update(before.split()[-1] for before, line in pairwise(lines) if line.strip() == LOCAL)
    with suppress(OSError):
        lines = (listed / "if_inet6").read_text().splitlines()
        found.update(str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))) for line in lines)
    addresses = sorted(map(ipaddress.ip_address, found), key=lambda each: (each.version, int(each)))
    return tuple(str(each) for each in addresses if not (each.is_loopback or each.is_link_local))[:MOST]
