"""A real vLLM as a job of the cluster: from the control API to a stream through the gateway, drained and stopped."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import requests

from benchmarks.servers.engines import VLLM_ENVIRONMENT, VLLM_HOME, vllm_missing
from controller.engine.shipped_templates import SHIPPED
from controller.wording.scaling import START_STEPS
from tests.ray.fleet import READY_S, Fleet

pytestmark = [pytest.mark.ray, pytest.mark.db, pytest.mark.thorough]

ID, START_S = "vllm-on-ray", 240.0  # on a busy machine
# The shipped template, on a device of the cluster, without the minutes that vLLM takes to compile for a CPU.
TEMPLATE = {
    **{name: value for name, value in SHIPPED["vllm"].items() if name != "roles"},
    "command": [*SHIPPED["vllm"]["command"], "--enforce-eager", "--dtype", "bfloat16"],
    "environment": VLLM_ENVIRONMENT,
    "spec": {"resources": {"device": 1}},
}
LONG = 400  # tokens, which take seconds


@pytest.fixture(scope="module", autouse=True)
def started(fleet: Fleet, figures: dict[str, object]) -> float:
    """Seconds that its start took. The program `vllm` is in the PATH of Ray."""
    if (missing := vllm_missing()) is not None:
        pytest.skip(missing)
    fleet.call(f"launch-templates/by-name/{ID}", TEMPLATE, "PUT")
    asked = {"backend": "vllm", "provisioner": "ray", "template": ID, "max_num_seqs": 8}
    fleet.call("instances", {**asked, "id": ID, "model": fleet.model, "spec": {"folder": str(VLLM_HOME / "model")}})
    took_s = fleet.system.until(lambda: fleet.ready() == [ID], START_S)
    figures["vllm_start_s"] = round(took_s, 1)
    return took_s


def streamed(fleet: Fleet, tokens: int, began: threading.Event | None = None) -> tuple[list[str], dict[str, Any]]:
    """Texts of a stream, and what it ended with: its usage. `began`: set with the first text."""
    headers = {"Authorization": f"Bearer {fleet.system.key()}"}
    body = {
        "model": fleet.model, "prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    url = f"{fleet.system.gateway}/v1/completions"
    answer = requests.post(url, json=body, headers=headers, stream=True, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-slackline-instance"] == ID
    texts: list[str] = []
    usage: dict[str, Any] = {}
    last = ""
    for line in filter(None, answer.iter_lines(decode_unicode=True)):
        last = line.removeprefix("data: ")
        said = {} if last == "[DONE]" else json.loads(last)
        usage = said.get("usage") or usage
        texts += [choice["text"] for choice in said.get("choices", [])]
        if began is not None:
            began.set()
    assert last == "[DONE]"
    return texts, usage


def test_it_is_a_job_on_a_node_and_streams_through_the_gateway(fleet, cluster):
    assert cluster.jobs()[ID] == "RUNNING"
    assert fleet.nodes()[ID] in cluster.nodes
    texts, usage = streamed(fleet, 12)
    assert usage["completion_tokens"] == 12
    assert len(texts) > 1


def test_nobody_else_is_answered(fleet):
    """Its key is its own, and came with the first lease: neither template nor job tells it."""
    url = fleet.column("url", ID)
    body = {"model": fleet.model, "prompt": "x", "max_tokens": 1}
    assert requests.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 401


def test_the_steps_of_its_start_are_on_its_page(fleet, started, figures):
    said = fleet.session.get(f"{fleet.system.console}/api/v1/instances/{ID}", timeout=10).json()
    steps = said["start_steps"]
    assert {"process", "weights", "listening", "ready"} <= set(steps)
    assert steps["process"] < steps["weights"] < steps["listening"] <= steps["ready"]
    assert steps["ready"] - steps["process"] <= started
    figures["vllm_steps_s"] = {name: round(at - steps["process"], 1) for name, at in steps.items()}
    page = fleet.session.get(f"{fleet.system.console}/fleet/instances/{ID}/", timeout=10)
    assert page.status_code == 200
    assert [name for name in steps if START_STEPS[name] not in page.text] == []


def test_its_log_is_read_from_its_node(fleet):
    log = f"{fleet.system.console}/api/v1/instances/{ID}/log"
    fleet.system.until(lambda: "Application startup complete" in fleet.session.get(log, timeout=10).text)


def test_it_is_drained_and_stopped(fleet, cluster):
    """A stop is at once, also for what streams: it is drained before. Then nothing of it is left."""
    url, began, ends = fleet.column("url", ID), threading.Event(), []
    client = threading.Thread(target=lambda: ends.append(streamed(fleet, LONG, began)))
    client.start()
    assert began.wait(60.0)
    fleet.call(f"instances/{ID}/drain", {})
    assert ends == [], "it was drained while it streamed"
    client.join(120.0)
    fleet.system.until(lambda: fleet.rows("draining") == {ID: "draining"}, READY_S)
    fleet.stop(ID)
    [(_, usage)] = ends
    assert usage["completion_tokens"] == LONG
    fleet.system.until(lambda: fleet.rows("stopped") == {ID: "stopped"}, READY_S)
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{url}/health", timeout=5)
    fleet.system.until(lambda: cluster.jobs()[ID] == "SUCCEEDED", 30.0)
    assert cluster.left() == []
