"""A real vLLM that the supervisor starts from the shipped template: its key, its steps, its end."""

from __future__ import annotations

import json
import os
import time

import pytest
import requests

from benchmarks.servers.engines import CONTEXT_TOKENS, VLLM_ENVIRONMENT, VLLM_HOME, vllm_missing
from controller.engine.shipped_templates import SHIPPED
from controller.models import LaunchTemplate
from controller.services.fleet.launch_templates import launch_of, shipped_templates_store
from tests import factories
from workers.http.fleet_proof import made_key
from workers.provisioners import ProcessProvisioner
from workers.supervisor.child import strays
from workers.supervisor.engine_processes import MARK, EngineFolder

pytestmark = [pytest.mark.vllm, pytest.mark.db, pytest.mark.usefixtures("db")]

START_S = 240.0  # on a busy machine


def settle(folder, condition, within_s):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, (folder.logs / "engine-v1.log").read_text()[-3000:]
        folder.sync()
        time.sleep(0.2)


def test_the_shipped_template_serves_a_model(tmp_path):
    if (missing := vllm_missing()) is not None:
        pytest.fail(missing, pytrace=False)
    shipped_templates_store()
    template = LaunchTemplate.objects.get(name="vllm")
    template.command = [*SHIPPED["vllm"]["command"], "--enforce-eager", "--dtype", "bfloat16"]
    model = factories.served_model(name="mid", context_tokens=CONTEXT_TOKENS)
    folder_of = {"folder": str(VLLM_HOME / "model")}
    row = factories.instance(
        model, id="v1", backend="vllm", template=template, max_num_seqs=8, spec=folder_of, url="",
        observed_state="pending",
    )  # fmt: skip
    folder = EngineFolder(tmp_path / "engines", tmp_path, {**os.environ, **VLLM_ENVIRONMENT, "FLEET_TOKEN": "fleet"})
    ours, began = ProcessProvisioner(folder.folder), time.time()
    try:
        ours.start("v1", {"id": "v1", "launch": launch_of(row)})
        settle(folder, lambda: bool(ours.observe()) and ours.observe()[0].state in ("ready", "exited"), START_S)
        [seen] = ours.observe()
        assert seen.state == "ready", seen.error
        body = {"model": "mid", "prompt": "Hello", "max_tokens": 4}
        assert requests.post(f"{seen.url}/v1/completions", json=body, timeout=60).status_code == 401
        told = {"Authorization": f"Bearer {made_key('fleet', 'v1')}"}
        answer = requests.post(f"{seen.url}/v1/completions", json=body, headers=told, timeout=60)
        first_s = time.time() - began
        assert answer.json()["usage"]["completion_tokens"] == 4
        steps = {name: round(at - began, 2) for name, at in (seen.steps or {}).items()}
        assert {"process", "weights", "listening", "ready"} <= set(steps)
        print(json.dumps({"start_s": steps, "first_answer_s": round(first_s, 2)}))
        assert made_key("fleet", "v1") not in (folder.logs / "engine-v1.log").read_text()
    finally:
        ours.stop("v1", 10.0)
        settle(folder, lambda: not ours.observe(), 30.0)
    assert strays(f"{MARK}={folder.folder}/v1") == []
