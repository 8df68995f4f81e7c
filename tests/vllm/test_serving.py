"""The gateway in front of real vLLM: answers, priorities, telemetry, hang-ups."""

from __future__ import annotations

import json
import random
import threading
import time

import aiohttp
import pytest

from benchmarks.load.trials import open_requests
from benchmarks.servers.engines import MAX_NUM_SEQS, MODEL_NAME, vllm_dtype
from controller.core.types import InstanceSpec
from tests.vllm.conftest import Client
from tests.waiting import until
from workers.backends.base import Limits
from workers.backends.vllm import VllmBackend

pytestmark = pytest.mark.vllm

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
SILENT = 1  # </s>, which the tokenizer skips
MESSAGES = [{"role": "user", "content": "def parse(text):"}]


def ids(count: int) -> list[int]:
    return [random.randrange(3, 1000) for _ in range(count)]


def events(response) -> list[str]:
    """The data of each server-sent event."""
    return [line[6:].decode() for line in response.iter_lines() if line.startswith(b"data: ")]


def test_completion(client: Client):
    answer = client.post(COMPLETIONS, prompt=ids(50), max_tokens=12, ignore_eos=True, slo_class="interactive")
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (50, 12)
    assert body["choices"][0]["finish_reason"] == "length"
    assert answer.headers["x-slackline-class"] == "interactive"
    assert answer.headers["x-slackline-instance"] in ("engine-0", "engine-1")


def test_streamed_completion_hides_the_usage_no_one_asked_for(client: Client):
    data = events(client.post(COMPLETIONS, prompt=ids(50), max_tokens=9, ignore_eos=True, stream=True))
    assert data[-1] == "[DONE]"
    chunks = [json.loads(item) for item in data[:-1]]
    assert all(chunk["choices"] for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_streamed_completion_with_usage(client: Client):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    data = events(client.post(COMPLETIONS, prompt=ids(20), max_tokens=7, ignore_eos=True, **options))
    usage = json.loads(data[-2])
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 7


def test_chat(client: Client):
    body = client.post(CHAT, messages=MESSAGES, max_tokens=6, ignore_eos=True).json()
    assert body["object"] == "chat.completion"
    assert body["usage"]["completion_tokens"] == 6


def test_response(client: Client):
    answer = client.post(RESPONSES, input="def parse(text):", max_output_tokens=6, ignore_eos=True, target_ttft=30)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["object"], body["status"], body["usage"]["output_tokens"]) == ("response", "incomplete", 6)
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["content"][0]["text"]


def test_streamed_response(client: Client):
    options = {"max_output_tokens": 6, "ignore_eos": True, "stream": True, "instructions": "Go on."}
    found = [json.loads(item) for item in events(client.post(RESPONSES, input="def parse(text):", **options))]
    assert found[-1]["type"] == "response.incomplete"
    text = "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")
    response = found[-1]["response"]
    assert response["output"][0]["content"][0]["text"] == text
    assert response["usage"]["output_tokens"] == 6


def test_streamed_chat(client: Client):
    data = events(client.post(CHAT, messages=MESSAGES, max_tokens=6, ignore_eos=True, stream=True))
    assert data[-1] == "[DONE]"
    assert json.loads(data[0])["choices"][0]["delta"]["role"] == "assistant"
    assert json.loads(data[-2])["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("path", "asked"), [(COMPLETIONS, {"prompt": [5, 6, 7]}), (CHAT, {"messages": MESSAGES})])
def test_tokens_without_text_arrive_as_they_are_made(client: Client, path: str, asked: dict[str, object]):
    """Their streams were once held back to their end: nothing in them looked like a first token."""
    options = {"max_tokens": 60, "ignore_eos": True, "allowed_token_ids": [SILENT], "stream": True}
    response = client.post(path, **asked, **options)
    assert response.status_code == 200, response.text
    began, arrivals, whole = time.monotonic(), [], b""
    for part in response.iter_content(None):
        arrivals.append(time.monotonic() - began)
        whole += part
    said = [json.loads(line[6:])["choices"][0] for line in whole.split(b"\n\n") if line.startswith(b"data: {")]
    assert "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in said) == ""
    assert len(said) > 40  # vLLM puts tokens together that its own server was late for
    assert len(arrivals) > 20, arrivals
    assert arrivals[0] < arrivals[-1] / 2


def test_both_servers_are_used(client: Client):
    """Ten long requests at once: no dispatcher leaves a server idle."""
    seen: list[str] = []

    def ask() -> None:
        reply = client.post(COMPLETIONS, prompt=ids(1500), max_tokens=20, ignore_eos=True, slo_class="patient")
        seen.append(reply.headers["x-slackline-instance"])

    threads = [threading.Thread(target=ask) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 10
    assert set(seen) == {"engine-0", "engine-1"}


def test_engine_error_reaches_the_client(client: Client):
    answer = client.post(COMPLETIONS, prompt=ids(5), max_tokens=5, temperature=-3)
    assert answer.status_code == 400
    assert "temperature" in answer.json()["error"]["message"]


def test_hang_up_aborts_in_the_engine(client: Client, servers):
    urls = [server.url for server in servers]
    until(lambda: sum(map(open_requests, urls)) == 0)
    response = client.post(COMPLETIONS, prompt=ids(30), max_tokens=3500, ignore_eos=True, stream=True)
    lines = response.iter_lines()  # held: one that is dropped closes the connection
    next(lines)
    until(lambda: sum(map(open_requests, urls)) == 1, what="the request is not in an engine")
    response.close()
    # 3,500 tokens take ten seconds and more: only an abort ends it sooner.
    assert until(lambda: sum(map(open_requests, urls)) == 0, 4, what="the engine still decodes")


def test_priority_overtakes_what_waits_in_the_engine(servers):
    """Beyond max_num_seqs vLLM queues by priority: one urgent request goes before eight that came first."""
    engine = Client(servers[0].url, {})
    first_token: dict[str, float] = {}
    started = time.monotonic()

    def ask(name: str, priority: int) -> None:
        options = {"max_tokens": 150, "ignore_eos": True, "stream": True, "priority": priority}
        response = engine.post(COMPLETIONS, prompt=ids(40), **options)
        lines = response.iter_lines()
        next(lines)
        first_token[name] = time.monotonic() - started
        assert sum(1 for _ in lines)  # to the end: its slot stays taken until then

    names = [f"patient-{index}" for index in range(MAX_NUM_SEQS + 8)]
    threads = [threading.Thread(target=ask, args=(name, 100)) for name in names]
    for thread in threads:
        thread.start()
    until(lambda: len(first_token) >= MAX_NUM_SEQS)
    urgent = threading.Thread(target=ask, args=("urgent", 0))
    urgent.start()
    for thread in (*threads, urgent):
        thread.join()
    later = sorted(first_token.values())[-8:]
    assert sum(first_token["urgent"] < at for at in later) >= 6


async def test_telemetry_of_the_adapter(servers):
    spec = InstanceSpec("engine-0", MODEL_NAME, servers[0].url)
    async with aiohttp.ClientSession() as session:
        backend = VllmBackend(spec, session, Limits())
        idle = await backend.telemetry(7.0)
        body = {"model": MODEL_NAME, "prompt": ids(30), "max_tokens": 600, "ignore_eos": True, "stream": True}
        async with session.post(f"{servers[0].url}{COMPLETIONS}", json=body) as response:
            await response.content.readany()
            busy = await backend.telemetry(8.0)
    assert (idle.observed_at, idle.running, idle.awake) == (7.0, 0, True)
    token_bytes = {"bfloat16": 8, "float32": 16}[vllm_dtype()] << 10
    assert idle.kv_capacity_tokens == (1 << 30) // token_bytes
    assert busy.running == 1
    assert busy.prompt_tokens_total >= idle.prompt_tokens_total + 30
    assert 0 < busy.kv_usage < 0.1
