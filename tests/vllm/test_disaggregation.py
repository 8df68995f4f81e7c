"""Prefill on one real vLLM, decode on another: KV moves through vLLM's own connector for shared storage."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from benchmarks.servers.engines import (
    CONTEXT_TOKENS,
    MAX_NUM_SEQS,
    MODEL_NAME,
    ROOT,
    RunningEngine,
    vllm_missing,
    vllm_servers,
)
from benchmarks.servers.stack import Stack, StackFleet
from tests.vllm.conftest import CLASSES, Client
from tests.vllm.test_serving import COMPLETIONS, events, ids
from workers.provisioners import Endpoint, StaticProvisioner

pytestmark = pytest.mark.vllm

EXTERNAL = re.compile(r'(?m)^vllm:prompt_tokens_by_source_total\{[^}]*source="external_kv_transfer"[^}]*\} ([0-9.e+]+)')


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[list[RunningEngine]]:
    """Two servers that share KV through a folder."""
    if (missing := vllm_missing()) is not None:
        pytest.fail(missing, pytrace=False)
    shared = folder / "kv"
    shared.mkdir()
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(shared)},
    }
    with vllm_servers(2, folder / "pd-logs", arguments=["--kv-transfer-config", json.dumps(transfer)]) as started:
        yield started


@pytest.fixture(scope="module")
def stages(folder: Path, pair: list[RunningEngine]) -> Iterator[Stack]:
    """The first prefills, the second decodes."""
    urls = [server.url for server in pair]
    fleet = StackFleet(
        MODEL_NAME, urls, "vllm", MAX_NUM_SEQS, CLASSES, None, CONTEXT_TOKENS, roles=("prefill", "decode")
    )
    with Stack(folder / "pd", fleet) as stack:
        yield stack


@pytest.fixture(scope="module")
def apart(stages: Stack) -> Iterator[Client]:
    with stages.gateway() as gateway:
        yield Client(gateway.url, {"Authorization": f"Bearer {stages.api_key}"})


def taken_over(engine: RunningEngine) -> float:
    """Prompt tokens whose KV came from outside."""
    found = EXTERNAL.search(requests.get(f"{engine.url}/metrics", timeout=10).text)
    return float(found[1]) if found else 0.0


def test_a_prompt_prefilled_on_one_server_is_continued_on_the_other(apart: Client, pair: list[RunningEngine]):
    before, prompt = taken_over(pair[1]), ids(1322)
    response = apart.post(COMPLETIONS, prompt=prompt, max_tokens=9, ignore_eos=True, temperature=0, stream=True)
    assert response.headers["x-slackline-instance"] == "engine-1"
    data = events(response)
    assert data[-1] == "[DONE]"
    text = "".join(choice["text"] for item in data[:-1] for choice in json.loads(item)["choices"])
    assert taken_over(pair[1]) - before >= 1280, "whole blocks came from the other server"
    alone = requests.post(
        f"{pair[0].url}{COMPLETIONS}",
        json={"model": MODEL_NAME, "prompt": prompt, "max_tokens": 9, "ignore_eos": True, "temperature": 0},
        timeout=120,
    ).json()
    assert text == alone["choices"][0]["text"]


def test_a_whole_answer_goes_the_same_way(apart: Client, pair: list[RunningEngine]):
    before = taken_over(pair[1])
    answer = apart.post(COMPLETIONS, prompt=ids(700), max_tokens=6, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 6
    assert taken_over(pair[1]) > before


TURN = """
from controller.services.actors import Actor
from controller.services.fleet.role_switches import role_order
for name, role in (("engine-0", "decode"), ("engine-1", "prefill")):
    assert role_order(actor=Actor.job("test"), instance_id=name, role=role) is None
"""


def test_each_takes_the_others_stage_once_its_role_is_another(apart: Client, pair: list[RunningEngine], stages: Stack):
    """Started with kv_both, so no server is told anything: gateways hear of the roles, and KV goes the other way."""
    command = [sys.executable, "manage.py", "shell", "-v", "0", "-c", TURN]
    environment = {**os.environ, **stages.environment, "SLACKLINE_ROLE": "worker"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=120)
    before, give_up_at = [taken_over(server) for server in pair], time.monotonic() + 30
    while True:
        prompt = ids(700)
        response = apart.post(COMPLETIONS, prompt=prompt, max_tokens=6, ignore_eos=True, temperature=0)
        assert response.status_code == 200, response.text
        if response.headers["x-slackline-instance"] == "engine-0":
            break
        assert time.monotonic() < give_up_at, "the gateway did not hear of it"
    gained = [taken_over(server) - was for server, was in zip(pair, before, strict=True)]
    assert gained[0] >= 640, "whole blocks came from the one that decoded before"
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 6, "ignore_eos": True, "temperature": 0}
    alone = requests.post(f"{pair[1].url}{COMPLETIONS}", json=body, timeout=120).json()
    assert response.json()["choices"][0]["text"] == alone["choices"][0]["text"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kv_role", "state"), [("kv_both", "ready"), ("kv_producer", "starting")])
def test_what_was_said_of_its_kv_role_is_compared_with_what_it_says(
    pair: list[RunningEngine], kv_role: str, state: str
):
    """The first such question may take a server longer than it is waited for: it looks its machine over."""
    server, give_up_at = (
        StaticProvisioner({"v": Endpoint(pair[0].url, "vllm", "prefill", kv_role)}),
        time.monotonic() + 60,
    )
    [seen] = server.observe()
    while seen.state != state or "Timeout" in seen.error or "not responded" in seen.error:
        assert time.monotonic() < give_up_at, seen
        [seen] = server.observe()
    assert seen.error == (
        "" if state == "ready" else "the server was started with kv_role kv_both but is registered with kv_producer"
    )
