"""A real vLLM server with the plug-in: its order, its tokens, and that a gateway knows it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import requests

from benchmarks.servers.engines import (
    MODEL_NAME,
    PLUGIN_ENVIRONMENT,
    VLLM_HOME,
    RunningEngine,
    plugin_arguments,
    vllm_servers,
)
from controller.core.types import InstanceSpec
from workers.backends.base import Limits
from workers.backends.vllm import VllmBackend
from workers.vllm_plugin.hints import PluginHints, hint_fields

pytestmark = pytest.mark.vllm
SEATS = 2
NONE = PluginHints()
BLOCKS = 20  # of 32 tokens: two long answers do not fit beside each other


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningEngine]:
    arguments = [
        *plugin_arguments({"order": "s_edf", "decode": "kairos_decode"}),
        *("--max-num-seqs", str(SEATS), "--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "512"),
        *("--block-size", "32"),
    ]
    with vllm_servers(1, folder / "plugin", arguments=arguments, environment=PLUGIN_ENVIRONMENT) as started:
        yield started[0]


def complete(url: str, prompt: list[int], tokens: int, hints: PluginHints = NONE, **extras: Any) -> dict[str, Any]:
    body = {
        "model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0,
        "return_token_ids": True, "vllm_xargs": {**hint_fields(hints), **extras},
    }  # fmt: skip
    answer = requests.post(f"{url}/v1/completions", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def counted(url: str, state: str) -> int:
    """Requests that are `waiting` or `running`."""
    lines = requests.get(f"{url}/metrics", timeout=10).text.splitlines()
    return int(float(next(line for line in lines if line.startswith(f"vllm:num_requests_{state}{{")).split()[-1]))


def until_counted(url: str, state: str, count: int, held: list[Future[None]]) -> None:
    """Until so many are, or one of `held` has ended."""
    until = time.monotonic() + 20
    while counted(url, state) < count and time.monotonic() < until and not any(each.done() for each in held):
        time.sleep(0.01)


async def test_a_gateway_learns_from_the_metrics_that_hints_are_read(
    server: RunningEngine, servers: list[RunningEngine]
) -> None:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        for url, reads in ((server.url, True), (servers[0].url, False)):
            backend = VllmBackend(InstanceSpec("a", MODEL_NAME, url), session, Limits(telemetry_s=10.0))
            await backend.telemetry(0.0)
            assert backend.reads_hints is reads


def test_the_earliest_deadline_that_can_be_met_is_served_first(server: RunningEngine) -> None:
    """Both seats are taken, and one comes free long before the other; the order of arrivals is another one."""
    ended: list[str] = []

    def ask(name: str, hints: PluginHints, tokens: int = 20) -> None:
        complete(server.url, [9 + len(name)] * 20, tokens, hints)
        ended.append(name)

    asked = {"missed": -30.0, "far": 900.0, "near": 300.0}
    with ThreadPoolExecutor(8) as pool:
        held = [pool.submit(ask, "held", NONE, tokens) for tokens in (180, 380)]
        until_counted(server.url, "running", 2, held)
        for count, (name, left_s) in enumerate(asked.items(), 1):
            pool.submit(ask, name, PluginHints(left_s, 1000.0, 5.0))
            until_counted(server.url, "waiting", count, held)
        assert not held[0].done(), "the machine was too slow: the first answer ended before all others waited"
    order = [name for name in ended if name != "held"]
    assert order == ["near", "far", "missed"]


def test_tokens_alone_are_vllms_own(server: RunningEngine, servers: list[RunningEngine]) -> None:
    for length in (5, 60, 200):
        prompt = [3 + (length * at) % 1000 for at in range(length)]
        ours = complete(server.url, prompt, 40, PluginHints(1.0, 1.0, 0.01))
        assert ours["token_ids"] == complete(servers[0].url, prompt, 40)["token_ids"]


def test_preempted_answers_are_whole(server: RunningEngine) -> None:
    def preemptions() -> float:
        lines = requests.get(f"{server.url}/metrics", timeout=10).text.splitlines()
        return float(next(line for line in lines if line.startswith("vllm:num_preemptions_total")).split()[-1])

    before = preemptions()
    prompts = [[5 + at] * 150 for at in range(3)]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda prompt: complete(server.url, prompt, 300, PluginHints(5.0, 5.0, 1.0)), prompts))
    assert preemptions() > before
    assert [len(answer["token_ids"]) for answer in answers] == [300] * 3


REFUSES = """
import importlib, vllm
vllm.__version__ = "0.33.0"
for part in ("vllm_plugin.scheduler", "vllm_connector.connector"):
    try:
        importlib.import_module(f"workers.{part}")
    except RuntimeError as error:
        print(error)
"""


def test_another_version_ends_the_start_with_a_clear_message() -> None:
    done = subprocess.run(
        [str(VLLM_HOME / "bin" / "python"), "-c", REFUSES],
        env={**os.environ, **PLUGIN_ENVIRONMENT}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    for part in ("scheduler", "KV connector"):
        assert f"Slackline's {part} supports vLLM 0.32.x, and this is vLLM 0.33.0" in done.stdout, done.stderr
