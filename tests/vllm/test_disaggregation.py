"""Prefill on one real vLLM, decode on another: KV moves through vLLM's own connector for shared storage."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from benchmarks.engines import CONTEXT_TOKENS, MAX_NUM_SEQS, MODEL_NAME, Engine, vllm_missing, vllm_servers
from benchmarks.stack import Fleet, Stack
from tests.vllm.conftest import CLASSES, Client
from tests.vllm.test_serving import COMPLETIONS, events, ids

pytestmark = pytest.mark.vllm

EXTERNAL = re.compile(r'(?m)^vllm:prompt_tokens_by_source_total\{[^}]*source="external_kv_transfer"[^}]*\} ([0-9.e+]+)')


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[list[Engine]]:
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
def apart(folder: Path, pair: list[Engine]) -> Iterator[Client]:
    """A gateway that prefills on the first and decodes on the second."""
    urls = [server.url for server in pair]
    fleet = Fleet(MODEL_NAME, urls, "vllm", MAX_NUM_SEQS, CLASSES, None, CONTEXT_TOKENS, roles=("prefill", "decode"))
    with Stack(folder / "pd", fleet) as stack, stack.gateway() as gateway:
        yield Client(gateway.url, {"Authorization": f"Bearer {stack.api_key}"})


def taken_over(engine: Engine) -> float:
    """Prompt tokens whose KV came from outside."""
    found = EXTERNAL.search(requests.get(f"{engine.url}/metrics", timeout=10).text)
    return float(found[1]) if found else 0.0


def test_a_prompt_prefilled_on_one_server_is_continued_on_the_other(apart: Client, pair: list[Engine]):
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


def test_a_whole_answer_goes_the_same_way(apart: Client, pair: list[Engine]):
    before = taken_over(pair[1])
    answer = apart.post(COMPLETIONS, prompt=ids(700), max_tokens=6, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 6
    assert taken_over(pair[1]) > before
