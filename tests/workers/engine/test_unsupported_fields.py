"""Fields that would change what a real model says are refused by name; what they ask for when they ask nothing is not.

An emulated engine says nothing of its own, and takes requests as clients send them to real ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from workers.engine.errors import ApiError
from workers.engine.requests import UNSUPPORTED_CHOICES, Generation, Served, parse_chat, parse_completion
from workers.engine.tokenizer import ChunkTokenizer

EMULATED = Served("m", 100, ChunkTokenizer())
REAL = replace(EMULATED, samples=True)

ASKED: list[tuple[str, Any]] = [
    ("presence_penalty", 0.5),
    ("frequency_penalty", -0.5),
    ("repetition_penalty", 1.1),
    ("repetition_penalty", 0.9),
    ("min_p", 0.05),
    ("stop_token_ids", [7]),
    ("stop_token_ids", [0]),
    ("logit_bias", {"7": -100}),
    ("bad_words", ["no"]),
    ("allowed_token_ids", [1, 2]),
    ("logits_processors", ["x.y"]),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}),
    ("structured_outputs", {"regex": "a+"}),
    ("guided_json", {"type": "object"}),
    ("guided_regex", "a+"),
    ("guided_choice", ["yes", "no"]),
    ("guided_grammar", "root ::= 'a'"),
]
NOTHING: list[tuple[str, Any]] = [
    *((name, None) for name in ("repetition_penalty", "min_p", *UNSUPPORTED_CHOICES)),
    ("presence_penalty", 0),
    ("frequency_penalty", 0.0),
    ("repetition_penalty", 1),
    ("min_p", 0),
    ("stop_token_ids", []),
    ("logit_bias", {}),
    ("bad_words", []),
    ("response_format", {"type": "text"}),
    ("structured_outputs", {}),
    ("guided_regex", ""),
]


def parsed(served: Served, **fields: Any) -> list[Generation]:
    messages = [{"role": "user", "content": "hi"}]
    chat = parse_chat({"messages": messages, **fields}, {}, served)
    return [parse_completion({"prompt": "hi", **fields}, {}, served), chat]


@pytest.mark.parametrize(("name", "value"), ASKED)
def test_what_would_change_the_answer_is_refused_by_name(name: str, value: Any) -> None:
    for parse, asked in ((parse_completion, {"prompt": "hi"}), (parse_chat, {"messages": [{"role": "user"}]})):
        with pytest.raises(ApiError) as refused:
            parse({**asked, name: value}, {}, REAL)
        assert (refused.value.status, refused.value.param) == (400, name)
        assert name in str(refused.value)


@pytest.mark.parametrize(("name", "value"), NOTHING)
def test_what_asks_for_nothing_is_taken(name: str, value: Any) -> None:
    assert [each.max_tokens > 0 for each in parsed(REAL, **{name: value})] == [True, True]


@pytest.mark.parametrize(("name", "value"), ASKED)
def test_an_emulated_engine_takes_what_is_meant_for_a_real_one(name: str, value: Any) -> None:
    assert [each.max_tokens > 0 for each in parsed(EMULATED, **{name: value})] == [True, True]


@pytest.mark.parametrize(
    ("name", "value"), [("min_p", 1.5), ("min_p", "a"), ("repetition_penalty", -1), ("presence_penalty", 3)]
)
def test_a_wrong_number_is_refused_by_either(name: str, value: Any) -> None:
    for served in (REAL, EMULATED):
        with pytest.raises(ApiError) as refused:
            parsed(served, **{name: value})
        assert refused.value.param == name


def test_only_response_format_has_a_plain_text() -> None:
    with pytest.raises(ApiError) as refused:
        parsed(REAL, guided_json={"type": "text"})
    assert refused.value.param == "guided_json"
