"""What clients get wrong, end to end: OpenAI's error shape naming the field, never a 500, and nothing queued."""

import asyncio
import json
import time
from collections import Counter

import aiohttp
import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.openai.protocol.errors import KINDS
from tests.faults.load import Sent, recorded
from workers.workflows import MOST_TOOLS

pytestmark = [pytest.mark.db, pytest.mark.slow]

GOOD = {"model": "demo", "prompt": "Hello", "max_tokens": 4}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
RESPONSE = {"model": "demo", "input": "Hello", "max_output_tokens": 4}
STEP = {"workflow_id": "w", "step_key": "s"}
LIMIT = 2 << 20


def of(**metadata):
    return GOOD | {"metadata": metadata}


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
    "metadata": (GOOD | {"metadata": ["w"]}, 400, "invalid_value", "metadata"),
    "workflow a number": (of(workflow_id=7), 400, "invalid_value", "metadata.workflow_id"),
    "workflow long": (of(workflow_id="w" * 121), 400, "invalid_value", "metadata.workflow_id"),
    "workflow with NUL": (of(workflow_id="a\0b"), 400, "invalid_value", "metadata.workflow_id"),
    "half a character": (of(workflow_id="a\ud800b"), 400, "invalid_json", None),
    "stage a number": (of(stage=7), 400, "invalid_value", "metadata.stage"),
    "stage long": (of(stage="s" * 121), 400, "invalid_value", "metadata.stage"),
    "stage with NUL": (of(stage="\0"), 400, "invalid_value", "metadata.stage"),
    "step a number": (of(workflow_id="w", step_key=7), 400, "invalid_value", "metadata.step_key"),
    "step long": (of(workflow_id="w", step_key="s" * 121), 400, "invalid_value", "metadata.step_key"),
    "step with NUL": (of(workflow_id="w", step_key="a\0"), 400, "invalid_value", "metadata.step_key"),
    "step of no workflow": (of(step_key="s"), 400, "invalid_value", "metadata.step_key"),
    "parents of no workflow": (of(parents=["a"]), 400, "invalid_value", "metadata.parents"),
    "parents text": (of(workflow_id="w", parents="a"), 400, "invalid_value", "metadata.parents"),
    "parents many": (
        of(workflow_id="w", parents=[f"p{number}" for number in range(33)]),
        400,
        "invalid_value",
        "metadata.parents",
    ),
    "parents a number": (of(workflow_id="w", parents=[3]), 400, "invalid_value", "metadata.parents"),
    "parents empty": (of(workflow_id="w", parents=[""]), 400, "invalid_value", "metadata.parents"),
    "parents with NUL": (of(workflow_id="w", parents=["a\0"]), 400, "invalid_value", "metadata.parents"),
    "parents twice": (of(workflow_id="w", parents=["a", "a"]), 400, "invalid_value", "metadata.parents"),
    "parents itself": (of(**STEP, parents=["s"]), 400, "invalid_value", "metadata.parents"),
    "state a number": (of(**STEP, state_ref=7), 400, "invalid_value", "metadata.state_ref"),
    "state empty": (of(**STEP, state_ref=""), 400, "invalid_value", "metadata.state_ref"),
    "state long": (of(**STEP, state_ref="x" * 513), 400, "invalid_value", "metadata.state_ref"),
    "state of two lines": (of(**STEP, state_ref="a\nb"), 400, "invalid_value", "metadata.state_ref"),
    "state not ASCII": (of(**STEP, state_ref="é"), 400, "invalid_value", "metadata.state_ref"),
    "state of no step": (of(workflow_id="w", state_ref="x"), 400, "invalid_value", "metadata.state_ref"),
    "workflow due, no workflow": (GOOD | {"workflow_deadline": 5}, 400, "invalid_value", "workflow_deadline"),
    "workflow due text": (of(workflow_id="w") | {"workflow_deadline": "soon"}, 400, "invalid_slo", "workflow_deadline"),
    "workflow due past": (of(workflow_id="w") | {"workflow_deadline": -1}, 400, "invalid_slo", "workflow_deadline"),
    "workflow due now": (of(workflow_id="w") | {"workflow_deadline": 0}, 400, "invalid_slo", "workflow_deadline"),
}


def gateway_log(system):
    return (system.folder / "logs" / "gateway.log").read_text(errors="replace")


@pytest.fixture(scope="module", autouse=True)
def ready(running):
    """As `system`, but once, since that takes a second. What the gateway has logged so far."""
    running.until(running.steady, within_s=90.0)
    return gateway_log(running)


@pytest.mark.parametrize("name", BAD)
def test_it_is_refused_by_name_of_the_field(running, name):
    body, status, code, param = BAD[name]
    answer = post(running, body)
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param), answer.text
    if param:
        assert param in error["message"]
    assert queued(running) == 0


NEW = {"deadline": 60}
FORK = {"step": "s", "branches": 2}
TOOL = {"kind": "tool", "name": "search", "took": 1}
REPORTS = "workflows/bad-input/steps"
BAD_CALLS = {
    "stages none": ("workflows", NEW | {"stages": []}, "stages"),
    "stages an object": ("workflows", NEW | {"stages": {}}, "stages"),
    "stages many": ("workflows", NEW | {"stages": [{"name": f"s{number}"} for number in range(33)]}, "stages"),
    "stages twice": ("workflows", NEW | {"stages": [{"name": "a"}, {"name": "a"}]}, "stages"),
    "stage no object": ("workflows", NEW | {"stages": ["a"]}, "stages[0]"),
    "stage no name": ("workflows", NEW | {"stages": [{"name": "a"}, {}]}, "stages[1].name"),
    "stage long": ("workflows", NEW | {"stages": [{"name": "s" * 121}]}, "stages[0].name"),
    "stage with NUL": ("workflows", NEW | {"stages": [{"name": "a\0"}]}, "stages[0].name"),
    "share nothing": ("workflows", NEW | {"stages": [{"name": "a", "share": 0}]}, "stages[0].share"),
    "share true": ("workflows", NEW | {"stages": [{"name": "a", "share": True}]}, "stages[0].share"),
    "share large": ("workflows", NEW | {"stages": [{"name": "a", "share": 1e9}]}, "stages[0].share"),
    "id a number": ("workflows", NEW | {"id": 7}, "id"),
    "id empty": ("workflows", NEW | {"id": ""}, "id"),
    "id long": ("workflows", NEW | {"id": "w" * 121}, "id"),
    "id with NUL": ("workflows", NEW | {"id": "a\0b"}, "id"),
    "no deadline": ("workflows", {"id": "w"}, "deadline"),
    "field unknown": ("workflows", NEW | {"stage": []}, "stage"),
    "fork of no step": ("workflows/w/fork", {"branches": 2}, "step"),
    "fork of a long step": ("workflows/w/fork", FORK | {"step": "s" * 121}, "step"),
    "fork with NUL": ("workflows/w/fork", FORK | {"step": "a\0"}, "step"),
    "branches missing": ("workflows/w/fork", {"step": "s"}, "branches"),
    "branches none": ("workflows/w/fork", FORK | {"branches": 0}, "branches"),
    "branches many": ("workflows/w/fork", FORK | {"branches": 65}, "branches"),
    "branches true": ("workflows/w/fork", FORK | {"branches": True}, "branches"),
    "fork_id a number": ("workflows/w/fork", FORK | {"fork_id": 7}, "fork_id"),
    "fork_id empty": ("workflows/w/fork", FORK | {"fork_id": ""}, "fork_id"),
    "fork_id long": ("workflows/w/fork", FORK | {"fork_id": "f" * 121}, "fork_id"),
    "fork_id with NUL": ("workflows/w/fork", FORK | {"fork_id": "a\0"}, "fork_id"),
    "tool no kind": (REPORTS, {"name": "search", "took": 1}, "kind"),
    "tool no name": (REPORTS, {"kind": "tool", "took": 1}, "name"),
    "tool a list": (REPORTS, TOOL | {"name": ["search"]}, "name"),
    "tool long": (REPORTS, TOOL | {"name": "x" * 121}, "name"),
    "tool with NUL": (REPORTS, TOOL | {"name": "a\0"}, "name"),
    "key a number": (REPORTS, TOOL | {"key": 7}, "key"),
    "key with NUL": (REPORTS, TOOL | {"key": "a\0"}, "key"),
    "digest an object": (REPORTS, TOOL | {"key": "k", "input_digest": {}}, "input_digest"),
    "took missing": (REPORTS, {"kind": "tool", "name": "search"}, "took"),
    "took text": (REPORTS, TOOL | {"took": "long"}, "took"),
    "took negative": (REPORTS, TOOL | {"took": -1}, "took"),
    "took true": (REPORTS, TOOL | {"took": True}, "took"),
    "ended tomorrow": (REPORTS, TOOL | {"ended_ago": -1}, "ended_ago"),
    "share_result text": (REPORTS, TOOL | {"key": "k", "share_result": "yes"}, "share_result"),
    "result of no key": (REPORTS, TOOL | {"result": 1}, "result"),
    "tool's state of no key": (REPORTS, TOOL | {"state_ref": "x"}, "state_ref"),
    "tool's parents text": (REPORTS, TOOL | {"parents": "a"}, "parents"),
    "tool's parents many": (REPORTS, TOOL | {"parents": [f"p{number}" for number in range(33)]}, "parents"),
    "tool's parents twice": (REPORTS, TOOL | {"parents": ["a", "a"]}, "parents"),
    "tool's parents itself": (REPORTS, TOOL | {"key": "k", "parents": ["k"]}, "parents"),
    "tool's parents unknown": (REPORTS, TOOL | {"parents": ["nobody"]}, "parents"),
    "tool unknown field": (REPORTS, TOOL | {"steps": []}, "steps"),
}


@pytest.fixture(scope="module")
def opened(running, ready):
    """The workflow of REPORTS."""
    assert post(running, {"id": "bad-input", "deadline": 3600}, "workflows").status_code in (200, 201)


@pytest.mark.usefixtures("opened")
@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_call_on_workflows_is_refused_alike(running, name):
    path, body, param = BAD_CALLS[name]
    answer = post(running, body, path)
    error = error_of(answer)
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_value", param), answer.text
    assert param in error["message"]


def test_steps_that_would_depend_on_each_other_are_refused(running, opened):
    for key, parents in (("a", []), ("b", ["a"])):
        assert post(running, TOOL | {"key": key, "parents": parents}, REPORTS).status_code == 201
    first = {"workflow_id": "bad-input", "step_key": "first"}
    assert post(running, of(**first)).status_code == 200
    assert post(running, TOOL | {"key": "later", "parents": ["first"]}, REPORTS).status_code == 201
    assert post(running, TOOL | {"key": "later", "parents": ["first"]}, REPORTS).status_code == 201, "the same again"
    answer = post(running, of(workflow_id="bad-input", step_key="first", parents=["later"]))
    assert (answer.status_code, error_of(answer)["param"]) == (400, "metadata.parents")
    taken = post(running, TOOL | {"key": "first"}, REPORTS)
    assert (taken.status_code, error_of(taken)["code"], error_of(taken)["param"]) == (409, "step_exists", "key")


def key_of(system, tenant):
    """A key of a new tenant without quotas, once the gateway knows it."""
    session = system.sign_in()
    for kind, body in (("tenants", {"name": tenant, "rpm": None}), ("api-keys", {"tenant": tenant, "name": "its own"})):
        made = system.control(session, kind, body)
        assert made.status_code == 201, made.text
    key = made.json()["secret"]
    system.until(lambda: post(system, NEW, "workflows", key=key).status_code == 201, within_s=5.0)
    return key


def test_workflows_of_others_do_not_exist(running, opened):
    key = key_of(running, "rival")
    answers = [
        post(running, TOOL, REPORTS, key=key),
        post(running, TOOL, "workflows/nobody/steps"),
        post(running, FORK, "workflows/bad-input/fork", key=key),
        post(running, b"", "workflows/bad-input/cancel", key=key),
    ]
    assert [(each.status_code, error_of(each)["code"]) for each in answers] == [(404, "not_found")] * 4
    headers = {"Authorization": f"Bearer {key}"}
    read = requests.get(f"{running.gateway}/v1/workflows/bad-input", headers=headers, timeout=10)
    assert (read.status_code, error_of(read)["code"]) == (404, "not_found")


STRANGE = ("", "%00", "a%00b", "%0A", "%FF%FE", "%ED%A0%80", "w" * 5_000, "..%2F..", "%25", "a/cancel/steps", "é")


@pytest.mark.parametrize("name", STRANGE)
def test_strange_names_in_an_address_are_unknown(running, name):
    """Of workflows and of stored responses."""
    headers = {"Authorization": f"Bearer {running.key()}"}
    bodies = {"/steps": TOOL, "/fork": FORK, "/cancel": {}}
    for path, below in (("workflows", ""), ("responses", ""), ("responses", "/input_items")):
        read = requests.get(f"{running.gateway}/v1/{path}/{name}{below}", headers=headers, timeout=10)
        assert (read.status_code, error_of(read)["code"]) == (404, "not_found"), (path, below)
    for below, body in bodies.items():
        answer = post(running, body, f"workflows/{name}{below}")
        assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found"), below
    answer = post(running, {}, f"responses/{name}/cancel")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found")
    for path in (f"responses/{name}", f"workflows/w/branches/{name}"):
        gone = requests.delete(f"{running.gateway}/v1/{path}", headers=headers, timeout=10)
        assert (gone.status_code, error_of(gone)["code"]) == (404, "not_found"), path


MANY = 10_001


async def test_ten_thousand_steps_of_a_workflow_are_taken_and_the_newest_known(running, say):
    key, path = key_of(running, "many"), "workflows/long/steps"
    assert post(running, {"id": "long", "deadline": 3600}, "workflows", key=key).status_code == 201
    numbers, statuses = iter(range(MANY)), Counter()

    async def report(client):
        for number in numbers:
            step = TOOL | {"key": f"step-{number}", "parents": []}
            async with client.post(f"{running.gateway}/v1/{path}", json=step) as answer:
                await answer.read()
                statuses[answer.status] += 1

    began = time.monotonic()
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as client:
        await asyncio.gather(*(report(client) for _ in range(16)))
    assert statuses == {201: MANY}
    took_s = time.monotonic() - began
    assert post(running, TOOL | {"key": "last", "parents": []}, path, key=key).status_code == 201
    assert post(running, TOOL | {"parents": ["last", f"step-{MANY - 1}"]}, path, key=key).status_code == 201
    old = post(running, TOOL | {"parents": ["step-0"]}, path, key=key)
    assert (old.status_code, error_of(old)["param"]) == (400, "parents")
    began = time.monotonic()
    answer = post(running, of(workflow_id="long", parents=["last"]), key=key)
    assert answer.status_code == 200, answer.text
    call_s = time.monotonic() - began
    sent = Sent(0.0, False, answer.headers["x-slackline-request-id"])
    recorded(running, [sent])
    [(tools, parents)] = running.query("SELECT tool_steps, parents FROM request_record WHERE id = %s", sent.id)
    assert (len(tools), parents) == (MOST_TOOLS, ["last"])
    headers = {"Authorization": f"Bearer {key}"}
    read = requests.get(f"{running.gateway}/v1/workflows/long", headers=headers, timeout=10)
    assert (read.status_code, read.json()["state"]) == (200, "open")
    say(reports_per_s=round(MANY / took_s), next_request_ms=round(1000 * call_s))


CALLS = {"completions": GOOD, "chat/completions": CHAT, "responses": RESPONSE}


@pytest.mark.parametrize("path", CALLS)
def test_names_are_refused_or_recorded_as_they_are(running, path):
    for field in ("workflow_id", "stage", "step_key"):
        answer = post(running, CALLS[path] | {"metadata": STEP | {field: "a\0b"}}, path)
        error = error_of(answer)
        assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_value", f"metadata.{field}")
        assert "NUL" in error["message"]
        answer = post(running, CALLS[path] | {"metadata": STEP | {field: "\udc00"}}, path)
        assert (answer.status_code, error_of(answer)["code"]) == (400, "invalid_json")
        assert "surrogate" in error_of(answer)["message"]
    odd = f"\n{path}\r\t\x7f\u2028\u202e'\"\\%00🦊"
    named = {"workflow_id": odd, "stage": odd, "step_key": odd, "parents": ["a\nb"]}
    answer = post(running, CALLS[path] | {"metadata": named}, path)
    assert answer.status_code == 200, answer.text
    sent = Sent(0.0, False, answer.headers["x-slackline-request-id"])
    recorded(running, [sent])
    sql = "SELECT workflow, stage, step_key, parents FROM request_record WHERE id = %s"
    assert running.query(sql, sent.id) == [(odd, odd, odd, ["a\nb"])]


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


WORDS = st.text(max_size=20) | st.sampled_from(["w", "s", "a\0", "a\nb", "é", "x" * 121, "bad-input", "tool"])
WILD = VALUES | WORDS | st.lists(WORDS, max_size=3) | st.sampled_from([0, 1, -1, 1e-9, 1e308, 2**63, 10**40, True])
STAGES = st.lists(st.fixed_dictionaries({}, optional={"name": WILD, "share": WILD}), max_size=3)
ITEMS = st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(("type", "role", "content", "id", "output"), WILD)))
OF_STEPS = ("workflow_id", "stage", "step_key", "parents", "state_ref")
PARTS = {"metadata": st.dictionaries(st.sampled_from(OF_STEPS), WORDS | WILD), "stages": STAGES, "input": ITEMS}
REQUEST = ("workflow_deadline", "workflow_steps_left", "checkpoint", "branch", "share_call", "metadata", "temperature")
RESPONSES = (
    *("input", "previous_response_id", "background", "store", "stream", "instructions", "tools", "tool_choice"),
    *("text", "reasoning", "include", "truncation", "max_output_tokens", "parallel_tool_calls", "user"),
)
TOOLS = ("kind", "name", "key", "took", "ended_ago", "parents", "input_digest", "share_result", "result", "state_ref")
ADDRESSES = {  # a right body, and the fields that are changed
    "completions": (GOOD | {"metadata": STEP}, REQUEST),
    "chat/completions": (CHAT | {"metadata": STEP}, (*REQUEST, "thinking_deadline", "stream")),
    "responses": (RESPONSE | {"metadata": STEP}, (*REQUEST, *RESPONSES)),
    "workflows": (NEW, ("id", "deadline", "stages")),
    "workflows/bad-input/fork": (FORK | {"fork_id": "f"}, ("step", "branches", "fork_id")),
    REPORTS: (TOOL | {"key": "s", "input_digest": "a", "parents": []}, TOOLS),
}


@st.composite
def changed(draw):
    path = draw(st.sampled_from(sorted(ADDRESSES)))
    right, fields = ADDRESSES[path]
    names = draw(st.lists(st.sampled_from(fields), max_size=3))
    return path, right | {name: draw(PARTS.get(name, st.nothing()) | WILD) for name in names}


@pytest.mark.usefixtures("opened")
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(sent=changed())
def test_no_workflow_and_no_response_at_all_is_answered_with_a_500(running, sent):
    path, body = sent
    answer = post(running, body, path)
    assert answer.status_code < 500 or answer.status_code == 504, (path, body, answer.text)
    if answer.status_code >= 400:
        error = error_of(answer)
        assert error["param"] or answer.status_code != 400 or error["code"] == "invalid_json", (path, body, error)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=200))
def test_no_bytes_at_all_are_answered_with_a_500(running, raw):
    answer = post(running, raw)
    assert 400 <= answer.status_code < 500, answer.text
    error_of(answer)


def test_nothing_of_all_that_is_left(system, ready):
    assert queued(system) == 0
    assert post(system, GOOD).status_code == 200
    assert gateway_log(system).count("Traceback") == ready.count("Traceback")
