"""SIGTERM and Ctrl-C of the supervisor under load: nothing lasts, and it starts again over the same data."""

import signal
import time

import pytest
import requests

from tests.faults.load import Load, missing_and_doubled

pytestmark = [pytest.mark.db, pytest.mark.slow]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_it_leaves_no_process_behind_and_starts_again(system, say, how):
    system.until(system.steady, within_s=60.0)  # what tests before this one started may still be stopping
    fleet = set(system.instances())
    [(decisions,)] = system.query("SELECT count(*) FROM decision")
    processes = len(system.processes())
    with Load(system, rate=10, body={"max_tokens": 20}) as load:
        system.until(lambda: load.ends()["done"] > 10)
        began = time.monotonic()
        assert system.stop(how) == 0
        stopped_s = time.monotonic() - began
    assert [process.cmdline() for process in system.processes()] == []
    up_s = system.up()
    system.until(system.steady, within_s=60.0)
    assert set(system.instances()) == fleet
    assert system.query("SELECT count(*) FROM decision")[0][0] >= decisions
    served = [sent for sent in load.sent if sent.id]
    assert served
    assert missing_and_doubled(system, served) == ([], [])
    body, headers = {"model": "demo", "prompt": "Hello"}, {"Authorization": f"Bearer {system.key()}"}
    answer = requests.post(f"{system.gateway}/v1/completions", json=body, headers=headers, timeout=20)
    assert answer.status_code == 200
    say(processes=processes, stopped_s=round(stopped_s, 1), up_s=round(up_s, 1), ends=dict(load.ends()))
