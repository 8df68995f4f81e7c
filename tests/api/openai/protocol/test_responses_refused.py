"""/v1/responses: what is wrong, not served or nested too deeply is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.openai.protocol.errors import ApiError
from api.openai.protocol.response_requests import NOT_SERVED, load_response_request, parse_response_request
from api.openai.protocol.schemas import Parsed
from controller.core.snapshot import ModelConfig
from tests.api.openai.gateways import TestBed
from tests.api.openai.protocol.responses import FUNCTION, PATH, asked


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": parts}]}


UNSERVED = {
    "conversation": {"id": "c"},
    "prompt": {"id": "p"},
    "max_tool_calls": 1,
    "include": ["reasoning.encrypted_content"],
    "top_logprobs": 2,
    "truncation": "auto",
    "service_tier": "flex",
    "stream_options": {"include_obfuscation": True},
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 5,
    "max_completion_tokens": 5,
}
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": None}),
    ("input", {"input": ""}),
    ("input", {"input": []}),
    ("input", {"input": "x" * 6000}),
    ("input[0]", {"input": ["hello"]}),
    ("input[0].type", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
    ("input[0].call_id", {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}),
    ("input[0].arguments", {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}),
    ("input[0].output", {"input": [{"type": "function_call_output", "call_id": "c"}]}),
    ("input[0].output[0].type", {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": 1}]}]}),
    ("tools", {"tools": {"type": "function"}}),
    ("tools[0]", {"tools": ["f"]}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools[1].name", {"tools": [FUNCTION, {"type": "function"}]}),
    ("tools[0].parameters", {"tools": [{**FUNCTION, "parameters": "none"}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [FUNCTION], "tool_choice": "maybe"}),
    ("tool_choice.name", {"tools": [FUNCTION], "tool_choice": {"type": "function"}}),
    ("parallel_tool_calls", {"parallel_tool_calls": "yes"}),
    ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}),
    ("input[0].content", {"input": [{"role": "user", "content": 5}]}),
    ("input[0].content[1].type", said({"type": "text", "text": "a"}, {"type": "input_image"})),
    ("input[0].content[0].text", said({"type": "input_text", "text": None})),
    ("instructions", {"instructions": ["x"]}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("max_output_tokens", {"max_output_tokens": "9"}),
    ("reasoning", {"reasoning": "high"}),
    ("reasoning.effort", {"reasoning": {"effort": "huge"}}),
    ("reasoning.summary", {"reasoning": {"summary": "auto"}}),
    ("text", {"text": "json"}),
    ("text.verbosity", {"text": {"verbosity": "low"}}),
    ("text.format.type", {"text": {"format": {"type": "grammar"}}}),
    ("text.format.name", {"text": {"format": {"type": "json_schema", "schema": {}}}}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "n"}}}),
    ("temperature", {"temperature": 9}),
    ("n", {"n": 2}),
    ("store", {"store": 0}),
    ("store", {"store": True}),
    ("background", {"background": True}),
    ("background", {"background": 1}),
    ("previous_response_id", {"previous_response_id": 1}),
    ("share_call", {"share_call": True}),
    ("share_call", {"share_call": 1, "temperature": 0}),
    ("target_ttft", {"target_ttft": -1}),
    ("model", {"model": None}),
]


def test_every_field_that_is_not_served_is_tried() -> None:
    assert UNSERVED.keys() == NOT_SERVED.keys()


@pytest.mark.parametrize(("field", "body"), [*((name, {name: value}) for name, value in UNSERVED.items()), *WRONG])
async def test_a_field_that_is_wrong_or_not_served_is_named(field: str, body: dict[str, Any]) -> None:
    async with TestBed() as bed:
        answer = await bed.ask(asked(**body), PATH)
        assert (answer.status, answer.error["param"]) == (400, field)
        assert not bed.gateway.runtime.requests
        assert bed.sink.records == []


LONG = "x" * 100_000


@pytest.mark.parametrize("body", [{"reasoning": {LONG: 1}}, {"text": {LONG: 1}}])
async def test_a_long_name_of_a_field_is_not_repeated_whole(body: dict[str, Any]) -> None:
    async with TestBed() as bed:
        answer = await bed.ask(asked(**body), PATH)
        assert answer.status == 400
        assert answer.error["param"] == next(iter(body)) + "." + "x" * 100
        assert len(answer.body) < 500


async def test_a_long_name_in_a_query_is_not_repeated_whole() -> None:
    async with TestBed() as bed:
        answer = await bed.ask(b"", f"{PATH}/resp_1", method="GET", query=f"{LONG[:60_000]}=1")
        assert (answer.status, answer.error["param"]) == (400, "x" * 100)
        assert len(answer.body) < 500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 40) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
PARTS = st.fixed_dictionaries({"type": st.sampled_from(["input_text", "input_image", 5])}, optional={"text": JSON})
ITEMS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "developer", "tool", None])},
    optional={
        "content": JSON | st.lists(PARTS, max_size=3),
        "type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning", 1]),
        "call_id": JSON,
        "output": JSON,
    },
)
FIELDS = (
    *UNSERVED,
    "store",
    "background",
    "previous_response_id",
    "tools",
    "tool_choice",
    "instructions",
    "max_output_tokens",
    "metadata",
    "reasoning",
    "stream",
    "temperature",
    "text",
)
BODIES = st.fixed_dictionaries(
    {"model": st.just("demo"), "input": st.text(min_size=1) | JSON | st.lists(ITEMS, max_size=3)},
    optional=dict.fromkeys(FIELDS, JSON),
)


def outcome(body: dict[str, Any], retention_s: int) -> Parsed | ApiError:
    try:
        request = load_response_request(json.dumps(body).encode())
        return parse_response_request(request, {"demo": ModelConfig("demo")}, retention_s=retention_s)
    except ApiError as error:
        return error


@given(BODIES, st.sampled_from([0, 60]))
@settings(max_examples=200, deadline=None)
def test_whatever_comes_is_understood_or_refused_by_name(body: dict[str, Any], retention_s: int) -> None:
    found = outcome(body, retention_s)
    if isinstance(found, ApiError):
        assert (found.status, bool(found.param)) == (400, True) or found.code == "invalid_json"
    else:
        assert found.echo is not None
        assert json.loads(found.head + b"}")["messages"]


@pytest.mark.parametrize("depth", [252, 253, 300])
async def test_what_is_nested_too_deeply_to_be_repeated_is_refused(depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    async with TestBed() as bed:
        answer = await bed.ask(
            b'{"model": "gpt", "stream": true, "input": "a", "metadata": {"a": ' + nested + b"}}", PATH
        )
        assert (answer.status, answer.error["code"]) == (400, "invalid_json")


async def test_nothing_is_stored_so_nothing_is_found_by_id() -> None:
    async with TestBed() as bed:
        answer = await bed.ask(b"", PATH + "/resp_1", method="GET")
        assert (answer.status, answer.error["code"]) == (404, "not_found")
        assert (await bed.ask(asked(), PATH, method="GET")).status == 405


async def test_what_is_not_served_says_what_is() -> None:
    async with TestBed() as bed:
        answer = await bed.ask({"model": "demo", "input": "x"}, "/v1/embeddings")
        assert (answer.status, answer.error["code"]) == (404, "not_found")
        assert PATH in answer.error["message"]
