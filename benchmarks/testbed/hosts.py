"""Hosts of a testbed: network namespaces on one switch (a bridge), with links of limited bandwidth and eight classes.

Each end of a link, the host's and the switch's, is an HTB class of the link's rate with a leaf for each class of
packets. Leaves are served by priority, the higher DSCP first; a small `rate` of its own keeps a lower class from
starving. A leaf is a FIFO in bytes. So two flows to one host meet at the switch, as they do on a real one.

Sockets, buffers, congestion control and losses are the kernel's own; only the speed of the links is emulated. All of it
lies in namespaces named `slackline-PID-...`, so nothing of this machine's own network is touched, and everything is
removed at the end. After a killed process `ip netns list` still shows them; `ip netns delete` removes them. Needs root,
`ip` and `tc` (Debian's iproute2).
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine.network import network_missing

CLASSES = 8
NETWORK = "198.18"  # reserved for network measurements (RFC 2544); the third number is the fabric, the fourth the host
DEVICE = "link"
CLASS_SHARE = 0.005  # of the link, that each class has in any case
QUEUE_BYTES = 192_000  # of each class at each port of a switch
HOST_QUEUE_BYTES = 2_000_000  # the same at a host, which drops nothing of its own
SOCKET_BYTES = 64 << 10  # of one connection in that queue (TCP small queues)
BURST_BYTES = 13000  # that may pass at once
GSO_BYTES = 12000  # of one packet inside the kernel: larger ones would keep an urgent one waiting
CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/run/netns")


def hosts_missing() -> str | None:
    """Why no testbed can be made, or None."""
    if (missing := network_missing()) is not None:
        return missing
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    name = f"slackline-{os.getpid()}-probe"
    tried = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if tried.returncode:
        return f"no network namespaces: {tried.stderr.strip()}"
    try:
        _run("ip", "-n", name, "link", "add", "probe", "type", "bridge")
        _run("ip", "netns", "exec", name, "tc", "-batch", "-", given=_shaped("lo", 1e6, QUEUE_BYTES))
    except RuntimeError as error:
        return f"the kernel lacks a part of the testbed: {error}"
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
    return None


@dataclass(frozen=True, slots=True)
class EmulatedHost:
    """`addresses`: one in each fabric."""

    name: str
    namespace: str
    addresses: Sequence[str]

    @property
    def command(self) -> tuple[str, ...]:
        """The prefix of a command that runs on this host."""
        return ("ip", "netns", "exec", self.namespace)

    def socket(self) -> socket.socket:
        """A TCP socket of this host's network, whichever the calling thread is in."""
        libc = ctypes.CDLL(None, use_errno=True)
        with (
            open("/proc/thread-self/ns/net", "rb") as here,
            open(NAMESPACES / self.namespace, "rb") as there,
        ):
            if libc.setns(there.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")
            try:
                made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            finally:
                if libc.setns(here.fileno(), CLONE_NEWNET):
                    raise SystemExit(f"cannot leave {self.namespace}")  # all that follows would be in a wrong network
        made.setblocking(False)
        return made


@contextmanager
def hosts_on_a_switch(names: Sequence[str], mbit: float, fabrics: int = 1) -> Iterator[dict[str, EmulatedHost]]:
    """Hosts by name, each with a link of `mbit` Mbit/s in each direction to each of `fabrics` switches, which know
    nothing of each other. Raises RuntimeError if it cannot be made; what was made is removed all the same."""
    if not 0 < len(names) < 250 or len(set(names)) != len(names):
        raise ValueError("a testbed has 1 to 249 hosts with different names")
    own = f"slackline-{os.getpid()}"
    hosts = {
        name: EmulatedHost(name, f"{own}-{name}", tuple(f"{NETWORK}.{fabric}.{place}" for fabric in range(fabrics)))
        for place, name in enumerate(names, start=1)
    }
    switches = [f"{own}-switch{fabric}" for fabric in range(fabrics)]
    made: list[str] = []
    try:
        for namespace in (*switches, *(host.namespace for host in hosts.values())):
            made.append(namespace)
            _run("ip", "netns", "add", namespace)
        for fabric, switch in enumerate(switches):
            _connect(switch, list(hosts.values()), fabric, mbit)
        yield hosts
    finally:
        for namespace in made:
            subprocess.run(
                ["ip", "netns", "delete", namespace], check=False, capture_output=True, start_new_session=True
            )


def left_over() -> list[str]:
    """Namespaces of this process that are still there."""
    if not NAMESPACES.is_dir():
        return []
    return sorted(each.name for each in NAMESPACES.iterdir() if each.name.startswith(f"slackline-{os.getpid()}-"))


def _connect(switch: str, hosts: Sequence[EmulatedHost], fabric: int, mbit: float) -> None:
    """All hosts to one switch. No spanning tree and no IPv6: nothing but what is sent is on the links."""
    lines = ["link add bridge type bridge forward_delay 0", "link set bridge up"]
    for host in hosts:
        lines += [
            f"link add {_port(host)} type veth peer name {DEVICE}{fabric} netns {host.namespace}",
            f"link set {_port(host)} master bridge gso_max_size {GSO_BYTES} up",
        ]
    _run("ip", "-n", switch, "-batch", "-", given="\n".join(lines))
    shaped = "".join(_shaped(_port(host), mbit * 1e6, QUEUE_BYTES) for host in hosts)
    _run("ip", "netns", "exec", switch, "tc", "-batch", "-", given=shaped)
    for host in hosts:
        device, address = f"{DEVICE}{fabric}", host.addresses[fabric]
        own = [
            "link set lo up",
            f"link set {device} gso_max_size {GSO_BYTES} up",
            f"address add {address}/24 dev {device}",
            # As data centres do: the kernel's 200 ms stand for the round trips of the Internet.
            f"route change {NETWORK}.{fabric}.0/24 dev {device} proto kernel scope link src {address} rto_min 10ms",
        ]
        _run("ip", "-n", host.namespace, "-batch", "-", given="\n".join(own))
        _run(*host.command, "tc", "-batch", "-", given=_shaped(device, mbit * 1e6, HOST_QUEUE_BYTES))
        # Connections rest between flows; beginning slowly after each rest is for the Internet.
        tcp = {"slow_start_after_idle": 0, "no_metrics_save": 1, "limit_output_bytes": SOCKET_BYTES}
        _run(*host.command, "sysctl", "-qw", *(f"net.ipv4.tcp_{name}={value}" for name, value in tcp.items()))


def _port(host: EmulatedHost) -> str:
    """The switch's end of its link."""
    return f"to{host.addresses[0].rsplit('.', 1)[1]}"


def tos_of(wire_class: int | None) -> int:
    """The TOS byte of a class of packets, as the engines mark them: 0, the most urgent, as CS7; None as the last."""
    return 0 if wire_class is None else (CLASSES - 1 - wire_class) << 5


def _shaped(device: str, bits: float, queue: int) -> str:
    """tc's commands for one port: `bits` a second, `queue` bytes of each class."""
    on, burst = f"dev {device}", f"burst {BURST_BYTES} cburst {BURST_BYTES} quantum {GSO_BYTES}"
    lines = [
        f"qdisc add {on} root handle 1: htb default {CLASSES + 1}",
        f"class add {on} parent 1: classid 1:99 htb rate {bits:.0f}bit ceil {bits:.0f}bit {burst}",
    ]
    for each in range(CLASSES):
        leaf = each + 2
        lines += [
            f"class add {on} parent 1:99 classid 1:{leaf} htb rate {bits * CLASS_SHARE:.0f}bit ceil {bits:.0f}bit "
            f"prio {each} {burst}",
            f"qdisc add {on} parent 1:{leaf} handle {leaf}: bfifo limit {queue}",
            f"filter add {on} parent 1: protocol ip prio 1 u32 match ip tos {tos_of(each):#x} 0xe0 flowid 1:{leaf}",
        ]
    return "\n".join(lines) + "\n"


def _run(*command: str, given: str | None = None) -> None:
    """Raises RuntimeError. In a session of its own: Ctrl-C is for us, who undo what was made."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, input=given, start_new_session=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
