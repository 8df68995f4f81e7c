from __future__ import annotations

import json
from typing import Any

import pytest

from api.openai.protocol import schemas
from api.openai.protocol.errors import ApiError
from api.openai.protocol.schemas import parse_request
from controller.core.snapshot import ModelConfig
from controller.predict.lengths import PromptText

MODEL = ModelConfig("demo", ("gpt",), context_tokens=1000)
MODELS = {"demo": MODEL, "gpt": MODEL}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hello"}]}
TEXT = {"model": "demo", "prompt": "hello"}


def parse(body: Any, chat: bool = False) -> Any:
    return parse_request(body if isinstance(body, bytes) else json.dumps(body).encode(), MODELS, chat=chat)


def upstream(parsed: Any) -> dict[str, Any]:
    return json.loads(parsed.head + b"}")


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'"text"', b"null", b"\xff{}", b'{"model": NaN}'])
def test_bodies_that_are_no_json_object_are_refused(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(raw)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("depth", [260, 900])
def test_a_body_nested_too_deeply_to_be_sent_on_is_refused(depth: int) -> None:
    with pytest.raises(ApiError) as caught:
        parse(b'{"model": "demo", "prompt": "hello", "tools": ' + b"[" * depth + b"]" * depth + b"}")
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


BAD = [
    ({"model": None}, "invalid_value", "model"),
    ({"model": 7}, "invalid_value", "model"),
    ({"model": ""}, "invalid_value", "model"),
    ({"model": "nobody"}, "model_not_found", "model"),
    ({"prompt": None}, "invalid_value", "prompt"),
    ({"prompt": ""}, "invalid_value", "prompt"),
    ({"prompt": []}, "invalid_value", "prompt"),
    ({"prompt": {"text": "x"}}, "invalid_value", "prompt"),
    ({"prompt": [1, "x"]}, "invalid_value", "prompt"),
    ({"prompt": [1, True]}, "invalid_value", "prompt"),
    ({"prompt": [1, -2]}, "invalid_value", "prompt"),
    ({"prompt": [1.5]}, "invalid_value", "prompt"),
    ({"prompt": ["a", "b"]}, "invalid_value", "prompt"),
    ({"prompt": [[1], [2]]}, "invalid_value", "prompt"),
    ({"prompt": list(range(1000))}, "context_length_exceeded", "prompt"),
    ({"prompt": list(range(990)), "max_tokens": 11}, "context_length_exceeded", "prompt"),
    ({"prompt": "x" * 6000}, "context_length_exceeded", "prompt"),
    ({"stream": "yes"}, "invalid_value", "stream"),
    ({"stream": 1}, "invalid_value", "stream"),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": 1}, "invalid_value", "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "invalid_value", "stream_options.include_usage"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"max_tokens": -1}, "invalid_value", "max_tokens"),
    ({"max_tokens": "4"}, "invalid_value", "max_tokens"),
    ({"max_tokens": True}, "invalid_value", "max_tokens"),
    ({"n": 2}, "invalid_value", "n"),
    ({"n": 0}, "invalid_value", "n"),
    ({"best_of": 3}, "invalid_value", "best_of"),
    ({"temperature": "hot"}, "invalid_value", "temperature"),
    ({"temperature": 3}, "invalid_value", "temperature"),
    ({"top_p": -0.1}, "invalid_value", "top_p"),
    ({"metadata": "x"}, "invalid_value", "metadata"),
    ({"metadata": {"workflow_id": 3}}, "invalid_value", "metadata.workflow_id"),
    ({"metadata": {"stage": "s" * 201}}, "invalid_value", "metadata.stage"),
    ({"metadata": {"parents": ["a"]}}, "invalid_value", "metadata.parents"),
    ({"metadata": {"workflow_id": "w", "parents": "a"}}, "invalid_value", "metadata.parents"),
    ({"metadata": {"workflow_id": "w", "parents": ["a", "a"]}}, "invalid_value", "metadata.parents"),
    ({"metadata": {"workflow_id": "w", "parents": [3]}}, "invalid_value", "metadata.parents"),
    ({"metadata": {"workflow_id": "w", "parents": [""]}}, "invalid_value", "metadata.parents"),
    ({"metadata": {"workflow_id": "w", "step_key": "a", "parents": ["a"]}}, "invalid_value", "metadata.parents"),
    ({"metadata": {"workflow_id": "w", "parents": [str(n) for n in range(33)]}}, "invalid_value", "metadata.parents"),
    ({"target_ttft": -1}, "invalid_slo", "target_ttft"),
    ({"target_ttft": 0}, "invalid_slo", "target_ttft"),
    ({"target_ttft": "1"}, "invalid_slo", "target_ttft"),
    ({"target_tbt": -0.1}, "invalid_slo", "target_tbt"),
    ({"deadline": -5}, "invalid_slo", "deadline"),
    ({"deadline": 0}, "invalid_slo", "deadline"),
    ({"deadline": 1795000000}, "invalid_slo", "deadline"),
    ({"deadline": 1, "target_ttft": 2}, "invalid_slo", "deadline"),
    ({"waiting_time": -1}, "invalid_slo", "waiting_time"),
    ({"slo_class": 5}, "invalid_slo", "slo_class"),
    ({"priority": 1.5}, "invalid_slo", "priority"),
    ({"priority": -1}, "invalid_slo", "priority"),
]


@pytest.mark.parametrize(("change", "code", "param"), BAD, ids=[json.dumps(bad[0])[:60] for bad in BAD])
def test_a_bad_field_is_named(change: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse({**TEXT, **change})
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.status in (400, 404)


BAD_CHATS = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
]


@pytest.mark.parametrize(("change", "param"), BAD_CHATS)
def test_a_bad_chat_field_is_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse({**CHAT, **change}, chat=True)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_our_fields_are_stripped_and_the_engines_own_pass_through() -> None:
    parsed = parse({
        **TEXT, "model": "gpt", "target_ttft": 1, "target_tbt": 0.1, "deadline": 9, "waiting_time": 2, "slo_class": "a",
        "priority": 3, "request_id": "mine", "ignore_eos": True, "vllm_xargs": {"a": 1},
        "metadata": {"workflow_id": "w", "stage": "s", "team": "t"},
    })  # fmt: skip
    assert upstream(parsed) == {
        "model": "demo", "prompt": "hello", "ignore_eos": True, "vllm_xargs": {"a": 1}, "metadata": {"team": "t"},
    }  # fmt: skip
    assert (parsed.workflow, parsed.stage) == ("w", "s")
    assert parsed.asked.target_ttft == 1.0
    assert parsed.asked.priority == 3


def test_what_engines_tell_one_another_is_not_taken_from_clients() -> None:
    """A decode engine would fetch KV from whatever host it names."""
    offers = {"kv_transfer_params": {"remote_host": "x"}, "ec_transfer_params": {}, "rid": "r"}
    bootstrap = {"bootstrap_host": "x", "bootstrap_port": 1, "bootstrap_room": 2}
    assert upstream(parse({**TEXT, **offers, **bootstrap, "top_k": 3})) == {**upstream(parse(TEXT)), "top_k": 3}


@pytest.mark.parametrize(
    "field",
    [
        "custom_logit_processor", "lora_path", "logits_processors", "prompt_embeds", "chat_template", "cache_salt",
        "session_params", "data_parallel_rank", "extra_key", "mm_processor_kwargs", "a_field_of_the_next_release",
    ],
)  # fmt: skip
def test_only_listed_fields_reach_an_engine(field: str) -> None:
    assert upstream(parse({**TEXT, field: "x"})) == upstream(parse(TEXT))


@pytest.mark.parametrize(
    "extras",
    [
        {"kv_transfer_params": "x"}, {"kv_transfer_params": {"remote_host": "x"}}, {"ec_transfer_params": 1},
        {"a": {"kv_transfer_params": {}}}, {"a": [{}]}, "x", [1],
    ],
)  # fmt: skip
def test_nothing_of_engines_is_taken_within_extras(extras: object) -> None:
    with pytest.raises(ApiError) as caught:
        parse({**TEXT, "vllm_xargs": extras})
    assert (caught.value.status, caught.value.param) == (400, "vllm_xargs")


def test_hints_to_the_plug_in_are_not_taken_from_a_client() -> None:
    forged = {"slackline_ttft": 0.001, "Slackline_value": 1000, "mine": 1}
    assert upstream(parse({**TEXT, "vllm_xargs": forged}))["vllm_xargs"] == {"mine": 1}


CHAT = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    "options",
    [
        {"chat_template": "{% for x in range(10**9) %}{% endfor %}"}, {"tokenize": True}, {"tools": "x"},
        {"documents": "x"}, {"padding": True}, {"truncation": True}, {"max_length": 1}, {"return_dict": True},
        {"return_tensors": "pt"}, {"return_of_the_next_release": 1}, {"tokenizer_kwargs": "x"}, {"conversation": "x"},
        {"messages": "x"}, {"add_generation_prompt": False}, {"continue_final_message": True}, {"_private": 1}, {"": 1},
        {"two words": 1}, {"x" * 65: 1}, {"enable_thinking": {"a": 1}}, {"enable_thinking": [1]},
        {"enable_thinking": None}, {f"option_{n}": n for n in range(33)}, [], "x", True, {"long": "x" * 4097},
    ],
)  # fmt: skip
def test_a_template_gets_options_and_no_arguments_of_its_engine(options: object) -> None:
    """vLLM refuses some of these itself; other engines and versions pass all of them to `apply_chat_template`."""
    with pytest.raises(ApiError) as caught:
        parse({**CHAT, "chat_template_kwargs": options}, chat=True)
    assert (caught.value.status, caught.value.param) == (400, "chat_template_kwargs")


@pytest.mark.parametrize(
    "options", [{}, {"enable_thinking": False}, {"thinking_budget": 5, "date_string": "today", "temperature": 0.5}]
)
def test_usual_options_of_templates_reach_the_engine(options: dict[str, Any]) -> None:
    assert upstream(parse({**CHAT, "chat_template_kwargs": options}, chat=True))["chat_template_kwargs"] == options


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("structured_outputs", {"regex": "a+", "_backend": "outlines"}),
        ("structured_outputs", {"_backend_was_auto": True}),
        ("structured_outputs", "x"),
        ("response_format", {"type": "json_object", "_x": 1}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "_x": 1}}),
        ("response_format", [1]),
    ],
)
def test_internal_fields_of_structured_output_are_refused(field: str, value: object) -> None:
    with pytest.raises(ApiError) as caught:
        parse({**CHAT, field: value}, chat=True)
    assert (caught.value.status, caught.value.param) == (400, field)


def test_a_schema_may_have_any_property() -> None:
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"properties": {"_id": {"type": "string"}}}},
    }
    parsed = parse({**CHAT, "response_format": wanted, "structured_outputs": {"json": {"_id": 1}}}, chat=True)
    assert upstream(parsed)["response_format"] == wanted


def part(url: object, name: str = "image_url") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": name, name: url}]}]}


@pytest.mark.parametrize("name", ["image_url", "video_url", "audio_url"])
@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest", "https://10.0.0.1/x", "file:///etc/passwd", "https://pictures.example.org/x",
        "https://media.example.org@10.0.0.1/", "https://media.example.org\\@10.0.0.1/", "http://media.example.org/x",
        " https://media.example.org/x", None, 5,
    ],
)  # fmt: skip
def test_engines_fetch_nothing_for_a_client(name: str, url: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "_media_hosts", frozenset({"media.example.org"}))
    for link in (url, {"url": url}):
        with pytest.raises(ApiError) as caught:
            parse({"model": "demo", **part(link, name)}, chat=True)
        assert (caught.value.status, caught.value.param) == (400, "messages[0].content")


def test_data_and_listed_hosts_may_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "_media_hosts", frozenset({"media.example.org"}))
    for url in ("data:image/png;base64,AAAA", "https://media.example.org/x.png"):
        asked = part({"url": url})
        assert upstream(parse({"model": "demo", **asked}, chat=True))["messages"] == asked["messages"]


def test_a_long_name_of_a_link_is_not_repeated_whole() -> None:
    part = {"type": "image_url", "x" * 100_000 + "_url": "ftp://host"}
    with pytest.raises(ApiError) as caught:
        parse(CHAT | {"messages": [{"role": "user", "content": [part]}]}, chat=True)
    assert caught.value.param == "messages[0].content"
    assert len(caught.value.message) < 500


def test_a_part_of_another_type_is_refused() -> None:
    with pytest.raises(ApiError):
        parse({"model": "demo", "messages": [{"role": "user", "content": [{"type": "image_embeds"}]}]}, chat=True)


def test_token_ids_are_counted_and_text_is_measured() -> None:
    assert parse({**TEXT, "prompt": [5] * 17})[4:6] == (17, PromptText())
    assert parse({**TEXT, "prompt": [[5] * 17]})[4:6] == (17, PromptText())
    assert parse({**TEXT, "prompt": ["four"]})[4:6] == (0, PromptText(chars=4))
    parts = [{"role": "user", "content": [{"type": "text", "text": "abc"}]}, {"role": "assistant", "content": None}]
    assert parse({**CHAT, "messages": parts}, chat=True)[4:6] == (0, PromptText(chars=3, messages=2))
    tools = {"tools": [{"type": "function"}]}
    assert parse({**CHAT, "messages": parts, **tools}, chat=True).text.chars == 3 + len('[{"type":"function"}]')


def test_usage_is_always_asked_for_but_kept_only_when_wanted() -> None:
    wanted = parse({**TEXT, "stream": True, "stream_options": {"include_usage": True}})
    assert (wanted.streamed, wanted.keep_usage) == (True, True)
    other = parse({**TEXT, "stream": True, "stream_options": {"continuous_usage_stats": True}})
    assert not other.keep_usage
    assert upstream(other)["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}


def test_usage_is_asked_for_whatever_keys_are_nested_elsewhere() -> None:
    """A client's `stream_options` inside another object are not the request's own."""
    schema = {"type": "object", "properties": {"stream_options": {"type": "object"}}}
    parsed = parse({**TEXT, "stream": True, "guided_json": schema})
    assert upstream(parsed)["stream_options"] == {"include_usage": True}
    assert upstream(parsed)["guided_json"] == schema
    assert "stream_options" not in upstream(parse({**TEXT, "stream": False, "stream_options": None}))


def test_completions_default_to_sixteen_tokens_and_chats_to_the_context() -> None:
    assert parse(TEXT).max_tokens == 16
    assert parse(CHAT, chat=True).max_tokens is None
    assert parse({**CHAT, "max_tokens": 9, "max_completion_tokens": 5}, chat=True).max_tokens == 5
