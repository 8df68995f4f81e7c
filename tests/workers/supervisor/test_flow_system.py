"""The whole of `make up` with a `FLOW_POLICY`: its engines ask its daemon, and their records say what came of it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import psutil
import pytest
import requests

from tests.faults.outage import stopped
from tests.faults.system import System
from workers.supervisor.embedded import EmbeddedPostgres, EmbeddedRedis

pytestmark = [pytest.mark.db, pytest.mark.slow, pytest.mark.long(85)]
AT_ONCE = 6
AWAY_S = 10.0
LINK = 0.5e9 / 8  # bytes/s that the daemon assumes
FILLER = "filler"
MOST_LOADS = 20
LONG_WORDS = 2_000  # the transfer of so long a prompt lasts long enough for somebody who looks to see it half-way
MOVED = """SELECT step->'figures' FROM request_record, jsonb_array_elements(decisions) AS step
    WHERE step->>'kind' = 'transfer' AND workflow = %s"""


@pytest.fixture(scope="module")
def system(postgres: EmbeddedPostgres, redis_server: EmbeddedRedis) -> Iterator[System]:
    """One demo engine prefills and one decodes. Their link is slow in the daemon's eyes: each transfer fills it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOW_POLICY", "mfs")
        patch.setenv("FLOW_LINK_GBPS", f"{LINK * 8 / 1e9:g}")
        running = System(postgres.url, redis_server.url)
        try:
            running.up()
            apart(running)
            yield running
        finally:
            running.stop()
            for process in running.processes():
                process.kill()
            shutil.rmtree(running.folder, ignore_errors=True)


def apart(system: System) -> None:
    session = system.sign_in()
    for policy in session.get(f"{system.console}/api/v1/scaling-policies", timeout=10).json()["items"]:
        body = {"enabled": False, "version": policy["version"]}
        assert system.control(session, f"scaling-policies/{policy['id']}", body, "PATCH").status_code == 200
    roles = dict(zip(sorted(system.instances()), ("decode", "prefill"), strict=True))
    for name, role in roles.items():
        answer = system.control(session, f"instances/{name}/set-role", {"role": role})
        assert answer.status_code in (200, 202), answer.text
    query = "SELECT id, role FROM instance WHERE desired_state = 'running'"
    system.until(lambda: dict(system.query(query)) == roles, within_s=60.0)
    system.until(lambda: ask(system, "settling", 4) == 200 and moved(system, "settling"), within_s=60.0)


def ask(system: System, workflow: str, words: int) -> int:
    """The status of a request."""
    body = {"model": "demo", "prompt": "word " * words, "max_tokens": 4, "ignore_eos": True, "slo_class": "batch"}
    body["metadata"] = {"workflow_id": workflow}
    headers = {"Authorization": f"Bearer {system.key()}"}
    return requests.post(f"{system.gateway}/v1/completions", json=body, headers=headers, timeout=60).status_code


def load(system: System, workflow: str, words: int = 300) -> list[int]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda number: ask(system, workflow, words + number), range(AT_ONCE)))


def moved(system: System, workflow: str) -> list[dict[str, Any]]:
    """Figures of the transfers of these requests, as their records have them."""
    return [figures for (figures,) in system.query(MOVED, workflow)]


def status(system: System) -> dict[str, Any]:
    """What the daemon reports."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(10)
        client.connect(str(system.folder / "flowd.sock"))
        client.sendall(b'{"op": "status"}\n')
        for line in client.makefile():
            said = json.loads(line)
            if said["event"] == "status":
                return dict(said)
    raise AssertionError("no status")


def test_requests_are_scheduled_and_their_records_say_so(system):
    assert load(system, "scheduled") == [200] * AT_ONCE
    system.until(lambda: len(moved(system, "scheduled")) == AT_ONCE)
    found = moved(system, "scheduled")
    assert {each["flow"] for each in found} == {"scheduled"}
    assert all(1 <= each["flow_level"] <= 8 and each["bytes"] > 0 for each in found)
    assert max(each["held_s"] for each in found) > 0.0, "each of them fills the link"
    said = status(system)
    assert (said["policy"], said["bandwidth"]) == ("mfs", LINK)
    system.until(lambda: status(system)["flows"] == [])


def test_the_page_shows_what_was_held_with_links_to_the_requests(system):
    assert load(system, "shown") == [200] * AT_ONCE
    asked = "SELECT id FROM request_record WHERE workflow = 'shown'"
    system.until(lambda: len(system.query(asked)) == AT_ONCE)
    session = system.sign_in()

    def shown() -> bool:
        html = session.get(f"{system.console}/flows/", timeout=10).text
        return all(f'href="/requests/{name}/"' in html for (name,) in system.query(asked))

    system.until(shown)
    html = session.get(f"{system.console}/flows/", timeout=10).text
    assert "scheduling" in html
    (name,) = system.query("SELECT name FROM host")[0]
    assert re.search(rf"<h3[^>]*>\s*{re.escape(name)}\s", html), "the name that Fleet has for this host"
    assert max(float(each) for each in re.findall(r'data-label="Held">([\d.]+) (?:ms|s)<', html)) > 0.0


def test_the_policy_is_changed_without_a_restart(system):
    """FLOW_POLICY was stored as the first value; the stored one decides."""
    session, daemon = system.sign_in(), system.pid("flowd")
    address = f"{system.console}/api/v1/flow-settings"
    assert session.get(address, timeout=10).json()["flow_policy"] == "mfs"
    assert system.control(session, "flow-settings", {"flow_policy": "off"}, "PUT").status_code == 200
    system.until(lambda: status(system)["policy"] == "off")
    assert load(system, "off") == [200] * AT_ONCE
    system.until(lambda: len(moved(system, "off")) == AT_ONCE)
    assert not any(each.get("held_s") for each in moved(system, "off"))
    assert {each.get("flow", "") for each in moved(system, "off")} <= {"", "off"}
    assert system.control(session, "flow-settings", {"flow_policy": "mfs"}, "PUT").status_code == 200
    system.until(lambda: status(system)["policy"] == "mfs")
    assert load(system, "on again") == [200] * AT_ONCE
    system.until(lambda: len(moved(system, "on again")) == AT_ONCE)
    assert {each["flow"] for each in moved(system, "on again")} == {"scheduled"}
    assert system.pid("flowd") == daemon


# ---- faults in mid-transfer -----------------------------------------------------------------------------------------


@contextmanager
def loading(system: System, workflow: str) -> Iterator[tuple[str, Future[list[int]], Callable[[], None]]]:
    """The load, from the moment on in which one of its transfers was half-way and one is held, since the link is full:
    the name of its workflow, its statuses, and what frees the link. On a quick machine a load may be over before
    somebody sees that; then another one is sent."""
    over = threading.Event()

    def half_way() -> bool:
        return any(0 < each["left_bytes"] < each["size_bytes"] for each in status(system)["flows"])

    def held() -> bool:
        return any(not each["go"] and each["id"] != FILLER for each in status(system)["flows"])

    def seen(condition: Callable[[], bool], statuses: Future[list[int]]) -> bool:
        while not (found := condition()) and not statuses.done():
            time.sleep(0.005)
        return found

    with ThreadPoolExecutor(2) as pool:
        try:
            for number in range(MOST_LOADS):
                name, over = f"{workflow} {number}", threading.Event()
                statuses = pool.submit(load, system, name, LONG_WORDS)
                if seen(half_way, statuses):
                    pool.submit(fill, system, over)
                    if seen(held, statuses):
                        break
                    over.set()
                assert statuses.result(60.0) == [200] * AT_ONCE
            else:
                raise AssertionError(f"no transfer of {MOST_LOADS} loads was seen half-way beside one that is held")
            yield name, statuses, over.set
        finally:
            over.set()


def fill(system: System, over: threading.Event) -> None:
    """A transfer of the test's own that goes before all others and fills the link, until it is over or the daemon is
    gone."""
    left = 100 * LINK
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(system.folder / "flowd.sock"))

        def say(op: str, **more: Any) -> None:
            client.sendall(json.dumps({"op": op, "id": FILLER, **more}).encode() + b"\n")

        say("submit", stage=3, size_bytes=left, to="nobody", due_in_s=1000.0)
        say("urgent")
        while not over.wait(0.02):
            left -= 0.02 * LINK
            say("progress", left=left)
        say("completion")


@contextmanager
def hanging(process: psutil.Process) -> Iterator[float]:
    """The process and its children stop, and go on afterwards. Yields when that was."""
    frozen = [process, *process.children(recursive=True)]
    for each in frozen:
        each.send_signal(signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        for each in frozen:
            each.send_signal(signal.SIGCONT)


def page(system: System, session: requests.Session) -> str:
    return " ".join(session.get(f"{system.console}/flows/", timeout=20).text.split())


def scheduled_again(system: System) -> bool:
    workflow = f"again-{len(system.query('SELECT 1 FROM request_record'))}"
    assert ask(system, workflow, 300) == 200
    system.until(lambda: bool(moved(system, workflow)))
    return bool(moved(system, workflow)[0]["flow"] == "scheduled")


def test_a_daemon_that_hangs_in_mid_transfer_holds_nobody(system):
    session = system.sign_in()
    with loading(system, "hung") as (name, statuses, _), hanging(psutil.Process(system.pid("flowd"))):
        assert statuses.result(20.0) == [200] * AT_ONCE
        system.until(lambda: "The transfer daemon has not reported since" in page(system, session))
    system.until(lambda: len(moved(system, name)) == AT_ONCE)
    reasons = {each["flow"] for each in moved(system, name)}
    assert "silent" in reasons
    assert reasons <= {"silent", "unavailable", "no_answer", "scheduled"}
    assert max(each["held_s"] for each in moved(system, name)) < 10.0
    system.until(lambda: "the transfer daemon stopped responding, " in page(system, session))
    system.until(lambda: scheduled_again(system))
    system.until(lambda: "The transfer daemon has not reported since" not in page(system, session))


def test_a_daemon_that_is_killed_in_mid_transfer_holds_nobody_and_comes_back(system):
    before, session = system.pid("flowd"), system.sign_in()
    with loading(system, "killed") as (name, statuses, _):
        system.kill("flowd")
        assert statuses.result(20.0) == [200] * AT_ONCE
    system.until(lambda: system.pid("flowd") not in (None, before))
    system.until(lambda: len(moved(system, name)) == AT_ONCE)
    reasons = {each["flow"] for each in moved(system, name)}
    assert "lost" in reasons
    assert reasons <= {"lost", "unavailable", "scheduled"}
    system.until(lambda: "the connection to the transfer daemon was lost, " in page(system, session))
    system.until(lambda: scheduled_again(system))


def test_without_the_coordinator_transfers_go_on_by_the_policy(system):
    session, silent = system.sign_in(), "The coordinator has not run since"
    put = {"flow_policy": "mfs", "drop_budget": 0.2}
    assert system.control(session, "flow-settings", put, "PUT").status_code == 200
    system.until(lambda: "No request is pruned now" in page(system, session))
    coordinator = psutil.Process(system.pid("pruning"))
    with loading(system, "stopped") as (name, statuses, free), hanging(coordinator) as began:
        free()
        assert statuses.result(20.0) == [200] * AT_ONCE
        system.until(lambda: silent in page(system, session))
        assert load(system, "still stopped") == [200] * AT_ONCE
        time.sleep(max(0.0, began + AWAY_S - time.monotonic()))
    for workflow in (name, "still stopped"):
        system.until(partial(lambda each: len(moved(system, each)) == AT_ONCE, workflow))
        assert {each["flow"] for each in moved(system, workflow)} == {"scheduled"}
    system.until(lambda: silent not in page(system, session))
    assert system.control(session, "flow-settings", {"flow_policy": "mfs"}, "PUT").status_code == 200


def test_without_redis_transfers_go_on_by_the_policy(system, redis_server):
    session = system.sign_in()
    with loading(system, "redis gone") as (name, statuses, free), stopped(redis_server):
        free()
        began = time.monotonic()
        assert statuses.result(20.0) == [200] * AT_ONCE
        system.until(lambda: "Redis is unavailable, so no report of a transfer daemon" in page(system, session))
        assert load(system, "redis away") == [200] * AT_ONCE
        time.sleep(max(0.0, began + AWAY_S - time.monotonic()))
    for workflow in (name, "redis away"):
        system.until(partial(lambda each: len(moved(system, each)) == AT_ONCE, workflow))
        assert {each["flow"] for each in moved(system, workflow)} == {"scheduled"}
    system.until(lambda: "MFS: promoted near the deadline; assumes" in page(system, session))
