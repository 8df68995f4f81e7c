"""The second host and its link, as the kernel sees them."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from benchmarks.machine.network import network_missing, second_host
from benchmarks.scaleout.medium import raw_stream

pytestmark = pytest.mark.skipif(network_missing() is not None, reason=network_missing() or "")


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("gbit", [0.4, 1.0])
def test_the_link_carries_what_it_says(gbit: float) -> None:
    with second_host(gbit) as host:
        assert raw_stream(int(gbit * 1e9 / 8), host.here, host.command) == pytest.approx(gbit / 8, rel=0.15)


def test_nothing_of_it_is_left_after_an_error() -> None:
    def fails() -> None:
        assert host.name in namespaces()
        raise ValueError("in its middle")

    with pytest.raises(ValueError, match="in its middle"), second_host() as host:
        fails()
    assert host.name not in namespaces()
    links = subprocess.run(["ip", "link"], check=True, capture_output=True, text=True).stdout
    assert host.device not in links


def test_a_link_that_is_cut_carries_nothing_and_says_nothing_until_it_is_mended() -> None:
    with second_host() as host, socket.create_server((host.here, 0)) as server:
        server.settimeout(1.0)
        call = f"import socket; socket.create_connection(({host.here!r}, {server.getsockname()[1]}), 10)"
        host.cut()
        caller = subprocess.Popen([*host.command, sys.executable, "-c", call])
        with pytest.raises(TimeoutError):
            server.accept()
        assert caller.poll() is None
        host.mend()
        server.settimeout(10.0)  # it tries again after one second, and three
        server.accept()[0].close()
        assert caller.wait(10) == 0
