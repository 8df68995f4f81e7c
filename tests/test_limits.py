"""A test that hangs fails at its limit, says where, ends what it started, and leaves the others as they are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import LIMITS_S, set_limits

ROOT = Path(__file__).resolve().parent.parent

HANGS = """
import asyncio, contextlib, threading, time
from pathlib import Path
import pytest

pytestmark = pytest.mark.timeout(0.4)

def tell(name):
    with Path(__file__).with_name("told").open("a") as file:
        file.write(name + "\\n")

@pytest.fixture
def server():
    yield
    tell("server stopped")

def test_sleeps(server):
    here_it_hangs = time.sleep(60)

def test_thread_waits(server):
    def waits_in_a_thread():
        release.wait(60)
    release = threading.Event()
    thread = threading.Thread(target=waits_in_a_thread)
    thread.start()
    try:
        thread.join()
    finally:
        release.set()

@pytest.fixture
def hanging_start():
    time.sleep(60)

def test_starts(server, hanging_start):
    pass

@pytest.fixture
def hanging_stop():
    yield
    time.sleep(60)

def test_stops(server, hanging_stop):
    pass

def test_fails_and_stops(server, hanging_stop):
    assert False, "its own failure"

@contextlib.asynccontextmanager
async def serving():
    other = asyncio.create_task(busy())
    try:
        yield
    finally:
        tell("loop's server stopped" if not other.done() or other.cancelled() else "loop's server failed")
        other.cancel()

async def busy():
    while True:
        until = time.monotonic() + 0.02
        while time.monotonic() < until:
            pass
        await asyncio.sleep(0.001)

async def waits_for_ever():
    await asyncio.Event().wait()

async def test_loop_waits():
    async with serving():
        await waits_for_ever()

async def test_loop_is_blocked():
    time.sleep(60)

@pytest.mark.timeout(30)
def test_after():
    time.sleep(0.1)
"""


@pytest.fixture(scope="module", params=[0, 1], ids=["one process", "xdist"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What pytest printed, and what the tests' servers told."""
    folder = tmp_path_factory.mktemp("limits")
    (folder / "test_hangs.py").write_text(HANGS)
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.limits", "-p", "no:django", "-p", "no:cacheprovider"]
    command += ["-n", str(request.param), "-c", str(folder / "pytest.ini"), "-rA", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=90)
    return done.stdout + done.stderr, (folder / "told").read_text()


def section(said: str, test: str) -> str:
    """What is printed of a failure."""
    found = re.search(
        rf"^_{{3,}} (?:ERROR at \w+ of )?{test} _+$.*?(?=^_{{3,}} |^={{3,}} )", said, re.MULTILINE | re.DOTALL
    )
    assert found is not None, said
    return found[0]


@pytest.mark.parametrize(
    ("test", "where"),
    [
        ("test_sleeps", "here_it_hangs = time.sleep"),
        ("test_thread_waits", "in waits_in_a_thread"),
        ("test_starts", "in hanging_start|time.sleep"),
        ("test_stops", "in hanging_stop|time.sleep"),
        ("test_loop_waits", "in waits_for_ever"),
        ("test_loop_is_blocked", "time.sleep"),
    ],
)
def test_a_test_that_hangs_fails_and_says_where(run: tuple[str, str], test: str, where: str) -> None:
    told = section(run[0], test)
    assert "It took longer than its limit of 0.4 s" in told
    assert re.search(where, told), told


def test_the_others_pass_and_what_hangs_after_a_failure_is_ended_too(run: tuple[str, str]) -> None:
    said, _ = run
    summary = {line for line in said.splitlines() if re.match("(PASSED|FAILED|ERROR) .*::", line)}
    ends = {(line.split()[0], line.split("::")[1].split()[0]) for line in summary}
    assert {name for end, name in ends if end == "PASSED"} == {"test_stops", "test_after"}
    assert {name for end, name in ends if end == "ERROR"} == {"test_starts", "test_stops", "test_fails_and_stops"}
    assert "its own failure" in said


def test_what_they_started_is_stopped(run: tuple[str, str]) -> None:
    assert sorted(run[1].splitlines()) == ["loop's server stopped", *["server stopped"] * 5]


class Item:
    def __init__(self, *marks: pytest.MarkDecorator) -> None:
        self.marks = [each.mark for each in marks]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((each for each in self.marks if each.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)

    def limit_s(self) -> float | None:
        found = self.get_closest_marker("timeout")
        return found.args[0] if found else None


def test_the_limit_is_that_of_the_test_or_the_longest_of_its_kinds() -> None:
    plain, slow, both, own = (
        Item(),
        Item(pytest.mark.slow),
        Item(pytest.mark.slow, pytest.mark.vllm),
        Item(pytest.mark.vllm, pytest.mark.timeout(7)),
    )
    set_limits([plain, slow, both, own])  # type: ignore[list-item]
    assert [each.limit_s() for each in (plain, slow, both, own)] == [None, LIMITS_S["slow"], LIMITS_S["vllm"], 7]


def test_a_test_of_no_kind_has_the_limit_of_the_project(request: pytest.FixtureRequest) -> None:
    assert float(request.config.getini("timeout")) == 240
    assert hasattr(request.node, "cancel_timeout"), "its timer runs"
