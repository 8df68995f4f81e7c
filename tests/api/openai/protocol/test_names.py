"""Names that clients give to workflows, stages and steps: records keep them as they are, or they are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from api.openai.protocol.errors import ApiError
from api.openai.protocol.schemas import parse_request
from api.openai.protocol.tool_bodies import parse_tool
from api.openai.protocol.workflow_bodies import parse_fork, parse_workflow
from controller.core.snapshot import ModelConfig

MODELS = {"demo": ModelConfig("demo", (), context_tokens=1000)}
STEP = {"workflow_id": "w", "step_key": "s"}


def completion(body: dict[str, Any]) -> Any:
    return parse_request(json.dumps({"model": "demo", "prompt": "hello", **body}).encode(), MODELS, chat=False)


def of(parse: Callable[[bytes], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda body: parse(json.dumps(body).encode())


def places(name: str) -> dict[str, tuple[Callable[[dict[str, Any]], Any], dict[str, Any]]]:
    """Wherever a client gives a name, by the field that errors name."""
    tool = {"kind": "tool", "name": "search", "took": 1}
    return {
        "metadata.workflow_id": (completion, {"metadata": STEP | {"workflow_id": name}}),
        "metadata.stage": (completion, {"metadata": {"stage": name}}),
        "metadata.step_key": (completion, {"metadata": STEP | {"step_key": name}}),
        "metadata.parents": (completion, {"metadata": STEP | {"parents": ["a", name]}}),
        "branch": (completion, {"branch": name}),
        "id": (of(parse_workflow), {"deadline": 5, "id": name}),
        "stages[0].name": (of(parse_workflow), {"deadline": 5, "stages": [{"name": name}]}),
        "step": (of(parse_fork), {"branches": 2, "step": name}),
        "name": (of(parse_tool), tool | {"name": name}),
        "key": (of(parse_tool), tool | {"key": name}),
        "input_digest": (of(parse_tool), tool | {"input_digest": name}),
        "parents": (of(parse_tool), tool | {"parents": [name]}),
    }


@pytest.mark.parametrize("name", ["\0", "a\0b", "x" * 119 + "\0"])
@pytest.mark.parametrize("field", places(""))
def test_a_name_that_cannot_be_recorded_is_refused(field: str, name: str) -> None:
    parse, body = places(name)[field]
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_value", field)
    assert caught.value.message.startswith(f"{field}: ")
    assert "NUL" in caught.value.message


@pytest.mark.parametrize("name", ["x" * 121, 7, True, ["a"], {}])
@pytest.mark.parametrize("field", places(""))
def test_what_is_no_name_is_refused(field: str, name: Any) -> None:
    parse, body = places(name)[field]
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_value", field)
    assert "120 characters" in caught.value.message


@pytest.mark.parametrize("name", ["a\nb", " ", "\x7f\u2028\u202e", "🦊" * 120, "../x", "%00"])
@pytest.mark.parametrize("field", places(""))
def test_any_other_name_is_taken_as_it_is(field: str, name: str) -> None:
    parse, body = places(name)[field]
    assert repr(name)[1:-1] in repr(parse(body))


@pytest.mark.parametrize("field", places(""))
def test_half_a_character_is_no_json(field: str) -> None:
    parse, body = places("a\ud800b")[field]
    with pytest.raises(ApiError) as caught:
        parse(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert "surrogate" in caught.value.message
