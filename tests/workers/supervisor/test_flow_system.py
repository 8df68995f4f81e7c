"""The whole of `make up` with a `FLOW_POLICY`: its engines ask its daemon, and their records say what came of it."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.faults.system import System
from workers.supervisor.embedded import EmbeddedPostgres, EmbeddedRedis

pytestmark = [pytest.mark.db, pytest.mark.slow]
AT_ONCE = 6
MOVED = """SELECT step->'figures' FROM request_record, jsonb_array_elements(decisions) AS step
    WHERE step->>'kind' = 'transfer' AND workflow = %s"""


@pytest.fixture(scope="module")
def system(postgres: EmbeddedPostgres, redis_server: EmbeddedRedis) -> Iterator[System]:
    """One demo engine prefills and one decodes. Their link is slow in the daemon's eyes: each transfer fills it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOW_POLICY", "mfs")
        patch.setenv("FLOW_LINK_GBPS", "0.5")
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


def load(system: System, workflow: str) -> list[int]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda number: ask(system, workflow, 300 + number), range(AT_ONCE)))


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
    assert (said["policy"], said["bandwidth"]) == ("mfs", 0.5e9 / 8)
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


def test_a_killed_daemon_loses_no_request_and_comes_back(system):
    before = system.pid("flowd")
    system.kill("flowd")
    assert load(system, "without") == [200] * AT_ONCE
    system.until(lambda: system.pid("flowd") not in (None, before))
    system.until(lambda: len(moved(system, "without")) == AT_ONCE)
    assert {each["flow"] for each in moved(system, "without")} <= {"unavailable", "lost", "scheduled"}

    def again() -> bool:
        workflow = f"again-{len(system.query('SELECT 1 FROM request_record'))}"
        assert ask(system, workflow, 300) == 200
        system.until(lambda: bool(moved(system, workflow)))
        return moved(system, workflow)[0]["flow"] == "scheduled"

    system.until(again)
