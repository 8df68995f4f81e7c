"""Fields that would change what a real model says are refused by name; what they ask for when they ask nothing is not.

An emulated engine says nothing of its own, and takes requests as clients send them to real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from workers.engine.errors import HttpError
from workers.engine.http.requests import TABLE, AppliesTo, Generation, RequestRules, parse_chat, parse_completion
from workers.engine.text.tokenizer import VOCAB_SIZE, ChunkTokenizer

EMULATED = RequestRules("m", 100, ChunkTokenizer())
REAL = replace(EMULATED, samples=True)
Parse = Callable[[Any, Any, RequestRules], Generation]

ASKED: list[tuple[str, Any]] = [
    ("presence_penalty", 0.5),
    ("frequency_penalty", -0.5),
    ("repetition_penalty", 1.1),
    ("repetition_penalty", 0.9),
    ("min_p", 0.05),
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
    ("structural_tag", "{}"),
    ("watermarking", True),
    ("repetition_detection", {"max_pattern_size": 3, "min_count": 2}),
    ("thinking_token_budget", 0),
    ("skip_special_tokens", False),
    ("prompt_embeds", "AAAA"),
    ("truncate_prompt_tokens", 10),
    ("truncate_prompt_tokens", -1),
]
ASKED_OF_CHAT: list[tuple[str, Any]] = [
    ("add_generation_prompt", False),
    ("add_special_tokens", True),
    ("continue_final_message", True),
    ("chat_template", "{{ messages }}"),
    ("chat_template_kwargs", {"enable_thinking": False}),
    ("documents", [{"title": "a", "text": "b"}]),
    ("reasoning_effort", "low"),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
]
ASKED_OF_ANY: list[tuple[str, Any]] = [
    ("n", 2),
    ("n", 0),
    ("n", True),
    ("best_of", 3),
    ("use_beam_search", True),
    ("echo", True),
    ("suffix", "b"),
    ("logprobs", 0),
    ("logprobs", True),
    ("top_logprobs", 5),
    ("prompt_logprobs", 0),
    ("logprob_token_ids", [1]),
    ("return_token_ids", True),
    ("return_prompt_text", True),
]
NOTHING: list[tuple[str, Any]] = [
    *((row.name, None) for row in TABLE),
    *((row.name, value) for row in TABLE if row.on is not AppliesTo.CHAT for value in row.nothing),
    ("presence_penalty", 0),
    ("frequency_penalty", 0.0),
    ("repetition_penalty", 1),
    ("min_p", 0),
    ("n", 1.0),
    ("length_penalty", 2.0),
    ("truncation_side", "left"),
    ("parallel_tool_calls", False),
    ("include_reasoning", False),
    ("stream_interval", 4),
    ("vllm_xargs", {"a": 1}),
    ("session_id", "s"),
]


COMPLETION: dict[str, Any] = {"prompt": "hi"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
BOTH: tuple[tuple[Parse, dict[str, Any]], ...] = ((parse_completion, COMPLETION), (parse_chat, CHAT))


def parsed(served: RequestRules, **fields: Any) -> list[Generation]:
    return [parse({**asked, **fields}, {}, served) for parse, asked in BOTH]


def refusal(parse: Parse, body: dict[str, Any], served: RequestRules = REAL) -> HttpError:
    with pytest.raises(HttpError) as refused:
        parse(body, {}, served)
    assert refused.value.status == 400
    return refused.value


@pytest.mark.parametrize(("name", "value"), [*ASKED, *ASKED_OF_ANY])
def test_what_would_change_the_answer_is_refused_by_name(name: str, value: Any) -> None:
    for parse, asked in BOTH:
        error = refusal(parse, {**asked, name: value})
        assert error.param == name
        assert name in str(error)


@pytest.mark.parametrize(("name", "value"), ASKED_OF_CHAT)
def test_what_only_a_chat_has_is_refused_there(name: str, value: Any) -> None:
    assert refusal(parse_chat, {**CHAT, name: value}).param == name
    assert parse_completion({**COMPLETION, name: value}, {}, REAL).max_tokens > 0


def test_special_tokens_are_a_completions_and_no_chats() -> None:
    class Tokens(ChunkTokenizer):
        def encode(self, text: str, special: bool = True) -> list[int]:
            return [1, *super().encode(text)] if special else super().encode(text)

    served = replace(REAL, tokenizer=Tokens())
    lengths = [
        len(parse_completion({**COMPLETION, "add_special_tokens": special}, {}, served).tokens)
        for special in (True, False, None)
    ]
    assert lengths == [2, 1, 2]
    assert refusal(parse_completion, {**COMPLETION, "add_special_tokens": "no"}).param == "add_special_tokens"
    assert parse_chat({**CHAT, "add_special_tokens": False}, {}, REAL).max_tokens > 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("add_generation_prompt", True),
        ("tool_choice", "none"),
        ("tool_choice", "auto"),
        ("tools", []),
        ("documents", []),
    ],
)
def test_what_asks_a_chat_for_nothing_is_taken(name: str, value: Any) -> None:
    assert parse_chat({**CHAT, name: value}, {}, REAL).max_tokens > 0


@pytest.mark.parametrize(("name", "value"), [("tool_calls", [{"id": "a"}]), ("tools", [{"type": "function"}])])
def test_what_a_message_says_beside_its_text_is_refused(name: str, value: Any) -> None:
    said = [*CHAT["messages"], {"role": "assistant", "content": "hm", name: value}]
    error = refusal(parse_chat, {"messages": said})
    assert (error.param, f"messages[1].{name}" in str(error)) == ("messages", True)
    for plain in (None, [], ""):
        assert parse_chat({"messages": [{**said[1], name: plain}]}, {}, REAL).max_tokens > 0
    assert parse_chat({"messages": said}, {}, EMULATED).max_tokens > 0


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_what_the_model_reasoned_in_an_earlier_turn_is_dropped(name: str) -> None:
    said = [*CHAT["messages"], {"role": "assistant", "content": "hm"}]
    plain = parse_chat({"messages": said}, {}, REAL)
    said[1] = {**said[1], name: "Well."}
    assert parse_chat({"messages": said}, {}, REAL).tokens == plain.tokens


def test_the_refusal_says_what_the_field_may_be_and_comes_before_the_prompt_is_read() -> None:
    assert str(refusal(parse_completion, {**COMPLETION, "n": 2})) == "n is not supported by this engine, other than 1"
    assert str(refusal(parse_completion, {**COMPLETION, "echo": True})) == "echo is not supported by this engine"
    assert refusal(parse_completion, {"prompt_embeds": "AAAA"}).param == "prompt_embeds"
    asked = {"prompt": "x" * 10_000, "truncate_prompt_tokens": 10}
    assert refusal(parse_completion, asked).param == "truncate_prompt_tokens"


def test_no_field_has_two_rows() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE)


@pytest.mark.parametrize(("name", "value"), NOTHING)
def test_what_asks_for_nothing_is_taken(name: str, value: Any) -> None:
    assert [each.max_tokens > 0 for each in parsed(REAL, **{name: value})] == [True, True]


@pytest.mark.parametrize(("name", "value"), [*ASKED, *ASKED_OF_CHAT])
def test_an_emulated_engine_takes_what_is_meant_for_a_real_one(name: str, value: Any) -> None:
    assert [each.max_tokens > 0 for each in parsed(EMULATED, **{name: value})] == [True, True]


@pytest.mark.parametrize(("name", "value"), ASKED_OF_ANY)
def test_an_emulated_engine_answers_with_one_text_and_no_more_than_that(name: str, value: Any) -> None:
    for parse, asked in BOTH:
        assert refusal(parse, {**asked, name: value}, EMULATED).param == name


@pytest.mark.parametrize(
    ("name", "value"), [("min_p", 1.5), ("min_p", "a"), ("repetition_penalty", -1), ("presence_penalty", 3)]
)
def test_a_wrong_number_is_refused_by_either(name: str, value: Any) -> None:
    for served in (REAL, EMULATED):
        with pytest.raises(HttpError) as refused:
            parsed(served, **{name: value})
        assert refused.value.param == name


def test_only_response_format_has_a_plain_text() -> None:
    with pytest.raises(HttpError) as refused:
        parsed(REAL, guided_json={"type": "text"})
    assert refused.value.param == "guided_json"


STOPS: list[tuple[list[int] | None, set[int]]] = [(None, set()), ([], set()), ([7], {7}), ([0, 9, 9], {0, 9})]


@pytest.mark.parametrize(("asked", "found"), STOPS)
def test_stop_tokens_are_taken(asked: list[int] | None, found: set[int]) -> None:
    for served in (REAL, EMULATED):
        assert [each.stop_tokens for each in parsed(served, stop_token_ids=asked)] == [found, found]


@pytest.mark.parametrize("value", [7, "7", ["7"], [7.0], [True], [None], [-1], [VOCAB_SIZE], {"7": 1}, [7] * 129])
def test_what_are_no_stop_tokens_is_refused(value: Any) -> None:
    for parse, asked in BOTH:
        error = refusal(parse, {**asked, "stop_token_ids": value})
        assert (error.param, "stop_token_ids" in str(error)) == ("stop_token_ids", True)
