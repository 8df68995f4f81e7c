"""What clients get wrong, end to end: OpenAI's error shape naming the field, never a 500, and nothing queued."""

import json
import time

import aiohttp
import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.openai.protocol.errors import KINDS
from tests.faults.load import Sent, recorded

pytestmark = [pytest.mark.db, pytest.mark.slow]

GOOD = {"model": "demo", "prompt": "Hello", "max_tokens": 4}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
RESPONSE = {"model": "demo", "input": "Hello", "max_output_tokens": 4}
LIMIT = 2 << 20


def post(system, body, path="completions", key=None, **options):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key or system.key()}"}
    return requests.post(f"{system.gateway}/v1/{path}", data=raw, headers=headers | options, timeout=30)


def error_of(answer):
    """The error, once its shape is seen to be OpenAI's."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, answer.text
    assert error["message"]
    assert isinstance(error["code"], str)
    assert error["code"] in KINDS
    return error


def queued(system):
    """In the queue or on an engine: a refused request is in neither."""
    return system.metric("slackline_open_requests")


BAD = {
    "no JSON": (b'{"model": "demo"', 400, "invalid_json", None),
    "no UTF-8": (b'{"model": "\xff\xfe"}', 400, "invalid_json", None),
    "empty": (b"", 400, "invalid_json", None),
    "a list": (b"[]", 400, "invalid_json", None),
    "NaN": (b'{"model": "demo", "prompt": "x", "target_ttft": NaN}', 400, "invalid_json", None),
    "deep": (b"[" * 100_000, 400, "invalid_json", None),
    "model missing": ({"prompt": "x"}, 400, "invalid_value", "model"),
    "model unknown": (GOOD | {"model": "nobody"}, 404, "model_not_found", "model"),
    "model a number": (GOOD | {"model": 7}, 400, "invalid_value", "model"),
    "prompt missing": ({"model": "demo"}, 400, "invalid_value", "prompt"),
    "prompt an object": (GOOD | {"prompt": {}}, 400, "invalid_value", "prompt"),
    "prompt mixed": (GOOD | {"prompt": [1, "x"]}, 400, "invalid_value", "prompt"),
    "max_tokens negative": (GOOD | {"max_tokens": -1}, 400, "invalid_value", "max_tokens"),
    "max_tokens text": (GOOD | {"max_tokens": "many"}, 400, "invalid_value", "max_tokens"),
    "stream text": (GOOD | {"stream": "yes"}, 400, "invalid_value", "stream"),
    "temperature": (GOOD | {"temperature": 9}, 400, "invalid_value", "temperature"),
    "several answers": (GOOD | {"n": 3}, 400, "invalid_value", "n"),
    "ttft negative": (GOOD | {"target_ttft": -1}, 400, "invalid_slo", "target_ttft"),
    "ttft text": (GOOD | {"target_ttft": "soon"}, 400, "invalid_slo", "target_ttft"),
    "tbt zero": (GOOD | {"target_tbt": 0}, 400, "invalid_slo", "target_tbt"),
    "waiting negative": (GOOD | {"waiting_time": -0.1}, 400, "invalid_slo", "waiting_time"),
    "deadline past": (GOOD | {"deadline": -30}, 400, "invalid_slo", "deadline"),
    "deadline epoch": (GOOD | {"deadline": 1_600_000_000}, 400, "invalid_slo", "deadline"),
    "deadline before ttft": (GOOD | {"deadline": 1, "target_ttft": 2}, 400, "invalid_slo", "deadline"),
    "class unknown": (GOOD | {"slo_class": "golden"}, 400, "invalid_slo", "slo_class"),
    "priority negative": (GOOD | {"priority": -1}, 400, "invalid_slo", "priority"),
    "context, token ids": (GOOD | {"prompt": [1] * 9_000}, 400, "context_length_exceeded", "prompt"),
    "context, text": (GOOD | {"prompt": "word " * 40_000}, 400, "context_length_exceeded", "prompt"),
    "context with answer": (
        GOOD | {"prompt": [1] * 8_000, "max_tokens": 500},
        400,
        "context_length_exceeded",
        "prompt",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_it_is_refused_by_name_of_the_field(system, name):
    body, status, code, param = BAD[name]
    answer = post(system, body)
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param), answer.text
    if param:
        assert param in error["message"]
    assert queued(system) == 0


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": 3, "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_a_conversation_is_refused_alike(system, change, param):
    answer = post(system, CHAT | change, "chat/completions")
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"input": []}, "invalid_value", "input"),
        ({"input": [{"type": "input_image"}]}, "invalid_value", "input[0].type"),
        ({"previous_response_id": "resp_1"}, "not_found", "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "invalid_value", "tools[0].type"),
        ({"deadline": -30}, "invalid_slo", "deadline"),
        ({"input": "word " * 40_000}, "context_length_exceeded", "input"),
    ],
)
def test_a_response_is_refused_alike(system, change, code, param):
    answer = post(system, RESPONSE | change, "responses")
    error, status = error_of(answer), 404 if code == "not_found" else 400
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert queued(system) == 0


def test_targets_that_no_engine_can_meet_are_refused_by_field(system):
    prompt = {"prompt": [1] * 8_000}
    ttft = post(system, GOOD | prompt | {"target_ttft": 0.001, "target_tbt": 1})
    assert (ttft.status_code, error_of(ttft)["code"], error_of(ttft)["param"]) == (429, "slo_infeasible", "target_ttft")
    deadline = post(system, GOOD | prompt | {"deadline": 0.001})
    assert (deadline.status_code, error_of(deadline)["code"]) == (429, "slo_infeasible")
    assert error_of(deadline)["param"] == "deadline"
    refused = [Sent(0.0, False, answer.headers["x-slackline-request-id"]) for answer in (ttft, deadline)]
    recorded(system, refused)
    ids = [each.id for each in refused]
    assert system.query("SELECT DISTINCT outcome FROM request_record WHERE id = ANY(%s)", ids) == [("refused",)]


@pytest.mark.parametrize("size", [LIMIT + 1, 3 << 20, 40 << 20])
def test_a_body_beyond_the_limit_is_refused(system, size):
    answer = post(system, b'{"model": "demo", "prompt": "' + b"x" * (size - 31) + b'"}')
    assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")


async def test_a_body_beyond_the_limit_without_a_length_is_refused(system):
    async def endless():
        for _ in range(64):
            yield b"x" * 65_536

    headers = {"Authorization": f"Bearer {system.key()}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{system.gateway}/v1/completions", data=endless()) as answer,
    ):
        assert answer.status == 413
        assert (await answer.json())["error"]["code"] == "request_too_large"


def test_two_megabytes_within_the_limit_are_read_and_judged(system, say):
    head = b'{"model": "demo", "prompt": "'
    began = time.monotonic()
    answer = post(system, head + b"x" * (LIMIT - len(head) - 2) + b'"}')
    assert (answer.status_code, error_of(answer)["param"]) == (400, "prompt")
    say(answered_ms=round(1000 * (time.monotonic() - began)))


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer ", "Basic abc", "Bearer sk-unknown", "sk-x"])
def test_without_a_valid_key_nothing_is_said(system, authorization):
    headers = {} if authorization is None else {"Authorization": authorization}
    answer = requests.post(f"{system.gateway}/v1/completions", json=GOOD, headers=headers, timeout=10)
    assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")


def test_a_revoked_key_is_dead_within_a_second(system, say):
    session = system.sign_in()
    made = system.control(session, "api-keys", {"tenant": "demo", "name": "to be revoked"})
    assert made.status_code == 201, made.text
    secret = made.json()["secret"]
    learned = system.until(lambda: post(system, GOOD, key=secret).status_code == 200, within_s=5.0)
    gone = system.control(session, f"api-keys/{made.json()['id']}/revoke", {})
    assert gone.status_code == 200, gone.text
    began = time.monotonic()
    while (answer := post(system, GOOD, key=secret)).status_code == 200:
        assert time.monotonic() - began < 1.0
    died = time.monotonic() - began
    assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
    say(new_key_known_s=round(learned, 2), revoked_key_dead_s=round(died, 2))


def test_wrong_methods_and_addresses(system):
    headers = {"Authorization": f"Bearer {system.key()}"}
    for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/v1/nothing", 404), ("PUT", "/", 404)):
        answer = requests.request(method, system.gateway + path, headers=headers, timeout=10)
        assert answer.status_code == status
        error_of(answer)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    *("model", "prompt", "messages", "max_tokens", "stream", "stream_options", "temperature", "n", "metadata", "stop"),
    *("target_ttft", "target_tbt", "deadline", "waiting_time", "slo_class", "priority", "request_id", "logprobs"),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(change=st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=4), chat=st.booleans())
def test_no_body_at_all_is_answered_with_a_500(running, change, chat):
    answer = post(running, (CHAT if chat else GOOD) | change, "chat/completions" if chat else "completions")
    assert answer.status_code < 500 or answer.status_code == 504, (change, answer.text)
    if answer.status_code != 200:
        error_of(answer)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=200))
def test_no_bytes_at_all_are_answered_with_a_500(running, raw):
    answer = post(running, raw)
    assert 400 <= answer.status_code < 500, answer.text
    error_of(answer)


def test_nothing_of_all_that_is_left(system):
    assert queued(system) == 0
    assert post(system, GOOD).status_code == 200
