"""The testbed's hosts and links as the kernel sees them, and a thin run over them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import uvloop

from benchmarks.testbed.__main__ import NAMES, links
from benchmarks.testbed.figures import served, uncontended
from benchmarks.testbed.hosts import CLASSES, hosts_missing, hosts_on_a_switch, left_over, tos_of
from benchmarks.testbed.serve import host_names
from benchmarks.testbed.transport import Transport
from benchmarks.testbed.workload import PAYLOAD, PrefillLoad
from tests.waiting import until

ROOT = Path(__file__).parents[3]
THIN = PrefillLoad(ranks=2, mean=120.0, warm_up=1, counted=3)


@pytest.fixture(scope="module")
def allowed() -> None:
    """Not asked while tests are collected: to find out, a namespace is made."""
    if (missing := hosts_missing()) is not None:
        pytest.skip(missing)


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"slackline-{pid}-")]


def test_each_class_has_a_mark_of_its_own_and_none_is_the_last():
    assert [tos_of(each) for each in range(CLASSES)] == [0xE0, 0xC0, 0xA0, 0x80, 0x60, 0x40, 0x20, 0x00]
    assert tos_of(None) == tos_of(CLASSES - 1)


@pytest.mark.parametrize("names", [(), ("a", "a")])
def test_a_testbed_without_hosts_or_with_two_of_a_name_is_refused(names):
    with pytest.raises(ValueError, match="hosts"), hosts_on_a_switch(names, 100.0):
        pass


@pytest.mark.slow
@pytest.mark.usefixtures("allowed")
def test_a_link_carries_its_rate_and_the_first_class_goes_before_the_last():
    with hosts_on_a_switch(NAMES, 100.0) as hosts:
        found = uvloop.run(links(hosts, 100.0))
    assert 20.0 < found["payload_mbit"] < 105.0 * PAYLOAD, "a busy machine sends slower, never faster"
    for where in ("leaving_s", "arriving_s"):
        assert found[where]["first"] < 0.85 * found[where]["last"], where
    assert left_over() == []


@pytest.mark.slow
@pytest.mark.usefixtures("allowed")
def test_nothing_is_left_after_an_error():
    def fails() -> None:
        assert len(left_over()) == 3
        raise ValueError("in its middle")

    with pytest.raises(ValueError, match="in its middle"), hosts_on_a_switch(("a", "b"), 100.0):
        fails()
    assert left_over() == []


@pytest.mark.slow
@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_a_signal(number):
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.testbed", "--keep"], cwd=ROOT, env=dict(os.environ), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        until(lambda: len(namespaces(process.pid)) == 4, 20.0)
        process.send_signal(number)
        process.wait(20.0)
        assert namespaces(process.pid) == []


@pytest.mark.slow
@pytest.mark.usefixtures("allowed")
def test_a_run_serves_its_requests_with_and_without_daemons():
    with hosts_on_a_switch(host_names(THIN.settings), THIN.mbit, fabrics=2) as hosts:
        for policy, apart in (("off", True), ("mfs", False)):
            found = served(THIN, policy, 1, hosts, apart)
            assert found.ttft_s > 0
            assert found.cct_ms > 0
            assert set(found.unscheduled or {}) <= {"no_answer"}, "only a machine that is busy"
        took = uncontended(THIN, 3, hosts, "mfs")
    least = THIN.shape.kv_bytes(THIN.mean) / (THIN.mbit * 1e6 / 8)
    assert {len(seconds) for seconds in took.values()} == {3}
    assert min(min(seconds) for seconds in took.values()) > 0.5 * least, "bytes went over the link"
    assert left_over() == []


@pytest.mark.slow
@pytest.mark.usefixtures("allowed")
def test_a_host_that_is_gone_fails_the_transfer():
    async def send(hosts):
        async with Transport(hosts) as transport:
            subprocess.run([*hosts["b"].command, "ip", "link", "set", "link0", "down"], check=True)
            began = time.monotonic()
            with pytest.raises((OSError, TimeoutError)):
                await transport.send("a", "b", 1000)
            return time.monotonic() - began

    with hosts_on_a_switch(("a", "b"), 100.0) as hosts:
        assert uvloop.run(send(hosts)) < 10.0
    assert left_over() == []


def test_the_skip_is_the_last_line(monkeypatch, capsys):
    from benchmarks.testbed import __main__ as command

    monkeypatch.setattr(command, "hosts_missing", lambda: "ip missing")
    monkeypatch.setattr("sys.argv", ["testbed"])
    command.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"skipped": "ip missing"}
