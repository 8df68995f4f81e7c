"""One engine as a job of a real cluster: started by the worker, asked through the gateway, stopped."""

from __future__ import annotations

import pytest
import requests

from tests.ray.fleet import READY_S

pytestmark = [pytest.mark.ray, pytest.mark.db]


def test_an_engine_is_started_answers_and_is_stopped(fleet, cluster, figures):
    system, id = fleet.system, "ray-alone"
    fleet.start(id)
    figures["start_s"] = round(system.until(lambda: fleet.ready() == [id], READY_S), 1)
    assert fleet.nodes()[id] in cluster.nodes
    assert cluster.jobs()[id] == "RUNNING"
    headers = {"Authorization": f"Bearer {system.key()}"}
    body = {"model": fleet.model, "prompt": "a b c", "max_tokens": 5}
    answer = requests.post(f"{system.gateway}/v1/completions", json=body, headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-slackline-instance"] == id
    assert answer.json()["usage"]["completion_tokens"] == 5
    url = fleet.column("url", id)
    fleet.stop(id)
    system.until(lambda: fleet.rows("stopped") == {id: "stopped"}, READY_S)
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{url}/health", timeout=5)
    system.until(lambda: cluster.jobs()[id] == "SUCCEEDED", 30.0)
