"""Bad input to a real engine process: vLLM's error shape, the field named, nothing queued."""

import pytest

from tests.workers.engine.client import CHAT, COMPLETIONS, metric, post
from tests.workers.engine.process import FLEET

HELLO = [{"role": "user", "content": "hi"}]
P = {"prompt": "x"}
M = {"messages": HELLO}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (COMPLETIONS, {}, 400, "prompt"),
        (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
        (COMPLETIONS, {"prompt": []}, 400, "prompt"),
        (COMPLETIONS, {"prompt": {"a": 1}}, 400, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [1, True]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [10**12]}, 400, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 2049}, 400, "prompt"),
        (COMPLETIONS, {"prompt": [1] * 512}, 400, "prompt"),
        (COMPLETIONS, {**P, "model": "gpt-4"}, 404, "model"),
        (COMPLETIONS, {**P, "model": 4}, 400, "model"),
        (COMPLETIONS, {**P, "max_tokens": 0}, 400, "max_tokens"),
        (COMPLETIONS, {**P, "max_tokens": "10"}, 400, "max_tokens"),
        (COMPLETIONS, {**P, "max_tokens": 512}, 400, "max_tokens"),
        (COMPLETIONS, {**P, "max_tokens": 1.5}, 400, "max_tokens"),
        (COMPLETIONS, {**P, "min_tokens": 17}, 400, "min_tokens"),
        (COMPLETIONS, {**P, "min_tokens": -1}, 400, "min_tokens"),
        (COMPLETIONS, {**P, "n": 2}, 400, "n"),
        (COMPLETIONS, {**P, "best_of": 2}, 400, "best_of"),
        (COMPLETIONS, {**P, "echo": True}, 400, "echo"),
        (COMPLETIONS, {**P, "logprobs": 1}, 400, "logprobs"),
        (COMPLETIONS, {**P, "stream": "yes"}, 400, "stream"),
        (COMPLETIONS, {**P, "stream_options": {"include_usage": True}}, 400, "stream_options"),
        (COMPLETIONS, {**P, "stream": True, "stream_options": []}, 400, "stream_options"),
        (COMPLETIONS, {**P, "ignore_eos": 1}, 400, "ignore_eos"),
        (COMPLETIONS, {**P, "stop": [""]}, 400, "stop"),
        (COMPLETIONS, {**P, "stop": 7}, 400, "stop"),
        (COMPLETIONS, {**P, "seed": "a"}, 400, "seed"),
        (COMPLETIONS, {**P, "priority": 0.5}, 400, "priority"),
        (COMPLETIONS, {**P, "priority": 2**63}, 400, "priority"),
        (COMPLETIONS, {**P, "temperature": -1}, 400, "temperature"),
        (COMPLETIONS, {**P, "top_p": 1.5}, 400, "top_p"),
        (COMPLETIONS, {**P, "cache_salt": ""}, 400, "cache_salt"),
        (COMPLETIONS, {**P, "cache_salt": "a/b"}, 400, "cache_salt"),
        (COMPLETIONS, {**P, "request_id": 5}, 400, "request_id"),
        (CHAT, {}, 400, "messages"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": ["hi"]}, 400, "messages"),
        (CHAT, {"messages": [{"role": "king", "content": "hi"}]}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 4096}]}, 400, "messages"),
        (CHAT, {**M, "max_completion_tokens": 9999}, 400, "max_completion_tokens"),
        (CHAT, {**M, "logprobs": True}, 400, "logprobs"),
        (CHAT, {**M, "model": "nope"}, 404, "model"),
        ("/tokenize", {}, 400, "prompt"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-5]}, 400, "tokens"),
        ("/sleep?level=3", FLEET, 400, "level"),
        ("/sleep?mode=soon", FLEET, 400, "mode"),
        ("/wake_up?tags=coffee", FLEET, 400, "tags"),
    ],
)
async def test_the_wrong_field_is_named(http, path, body, status, param):
    found, answer = await post(http, path, body)
    error = answer["error"]
    assert (found, error["code"], error["param"]) == (status, status, param)
    assert error["type"] == ("NotFoundError" if status == 404 else "BadRequestError")
    assert param in error["message"] or status == 404 or "context length" in error["message"]
    assert await metric(http, "num_requests_waiting") + await metric(http, "num_requests_running") == 0


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"prompt": NaN}'])
async def test_what_is_no_json_object_is_a_400(http, raw):
    async with http.post(COMPLETIONS, data=raw) as response:
        assert response.status == 400
        assert "JSON" in (await response.json())["error"]["message"]


async def test_a_wrong_priority_header_is_a_400(http):
    status, answer = await post(http, COMPLETIONS, P, **{"X-Vllm-Priority": "high"})
    assert (status, answer["error"]["param"]) == (400, "priority")


async def test_a_huge_body_is_refused(http):
    async with http.post(COMPLETIONS, data=b" " * (17 * 1024 * 1024)) as response:
        assert response.status == 413


async def test_a_two_megabyte_prompt_is_a_400(http):
    status, answer = await post(http, COMPLETIONS, {"prompt": "x" * 2_000_000})
    assert (status, answer["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nope", 404), ("GET", COMPLETIONS, 405)])
async def test_unknown_paths_and_methods(http, method, path, status):
    async with http.request(method, path) as response:
        assert response.status == status
        assert (await response.json())["error"]["code"] == status
