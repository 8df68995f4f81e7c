"""/v1/responses: what is sent upstream, and what comes back whole and streamed."""

from __future__ import annotations

import json

import pytest

from api.openai.protocol.errors import ApiError
from api.openai.protocol.translation import UnreadableAnswer
from controller.core.types import Outcome
from tests.api.openai.gateways import TestBed, snapshot
from tests.api.openai.protocol.responses import FUNCTION, PATH, Heard, asked, delta, piece, told, upstream
from tests.waiting import until_on_loop
from workers.backends.base import UpstreamCall
from workers.backends.fake import FakeBackend, Script


async def test_a_whole_response() -> None:
    async with TestBed() as bed:
        answer = await bed.ask(asked(max_output_tokens=9, temperature=0.5, metadata={"a": "b"}), PATH)
        body = json.loads(answer.body)
        assert (answer.status, body["object"], body["status"], body["model"]) == (200, "response", "completed", "gpt")
        assert int(answer.headers["content-length"]) == len(answer.body)
        assert body["id"] == answer.headers["x-slackline-request-id"].replace("req-", "resp_")
        (item,) = body["output"]
        assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
        assert item["content"] == [{"type": "output_text", "text": "t0 t1 t2 t3", "annotations": [], "logprobs": []}]
        counts = [body["usage"][f"{kind}_tokens"] for kind in ("input", "output", "total")]
        assert counts == [8, 4, 12]
        assert (body["max_output_tokens"], body["temperature"], body["metadata"]) == (9, 0.5, {"a": "b"})
        assert (body["error"], body["incomplete_details"], body["store"]) == (None, None, False)
        (record,) = bed.sink.records
        assert (record.outcome, record.judged_by, record.slo_class) == (Outcome.OK, "e2e", "chat")


async def test_it_goes_upstream_as_a_chat_completion_with_its_slo_fields_taken_out() -> None:
    async with TestBed() as bed:
        body = asked(
            input=[
                {"role": "developer", "content": "be brief"},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "a"}, {"type": "text", "text": "b"}]},
            ],
            instructions="be kind",
            max_output_tokens=9,
            text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
            reasoning={"effort": "low"},
            store=False,
            truncation="disabled",
            prompt_cache_key="k",
            target_ttft=1.5,
            slo_class="chat",
            metadata={"workflow_id": "w", "stage": "s", "own": "o"},
            top_k=5,
        )
        assert (await bed.ask(body, PATH)).status == 200
        call, sent = upstream(bed)
        assert call.path == "/v1/chat/completions"
        assert sent == {
            "model": "demo",
            "messages": [
                {"role": "system", "content": "be kind"},
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            ],
            "max_completion_tokens": 9,
            "reasoning_effort": "low",
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
            },
            "metadata": {"own": "o"},
            "top_k": 5,
        }
        (record,) = bed.sink.records
        assert (record.workflow, record.stage, record.target_ttft_s) == ("w", "s", 1.5)


async def test_functions_and_their_calls_go_upstream_as_a_chats() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}', "id": "fc_1"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "4"}
    async with TestBed() as bed:
        body = asked(
            input=[{"role": "user", "content": "add"}, call, {**call, "call_id": "c2"}, result],
            tools=[FUNCTION],
            tool_choice={"type": "function", "name": "f"},
            parallel_tool_calls=False,
        )
        answer = await bed.ask(body, PATH)
        assert json.loads(answer.body)["tools"] == [FUNCTION]
        _, sent = upstream(bed)
        function = {"name": "f", "arguments": '{"a":1}'}
        assert sent["messages"] == [
            {"role": "user", "content": "add"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": name, "type": "function", "function": function} for name in ("c1", "c2")],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "4"},
        ]
        described = {name: FUNCTION[name] for name in ("name", "parameters", "strict")}
        assert sent["tools"] == [{"type": "function", "function": described}]
        assert sent["tool_choice"] == {"type": "function", "function": {"name": "f"}}
        assert sent["parallel_tool_calls"] is False


def test_a_whole_answer_that_calls_functions() -> None:
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in ("c1", "c2")]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    body = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}).encode()
    response = json.loads(Heard(streamed=False).hear(body).body)
    assert [(item["type"], item["call_id"], item["arguments"]) for item in response["output"]] == [
        ("function_call", "c1", "{}"),
        ("function_call", "c2", "{}"),
    ]
    assert len({item["id"] for item in response["output"]}) == 2
    assert response["status"] == "completed"


def test_a_streamed_answer_that_says_something_and_calls_functions() -> None:
    answer = Heard(streamed=True).hear(
        delta(role="assistant", content=""),
        delta(content="so "),
        delta(tool_calls=[piece(0, "", id="c1")]) + delta(tool_calls=[piece(0, '{"a"')]),
        delta(tool_calls=[piece(0, ":1}")]),
        delta(tool_calls=[piece(1, "{}", id="c2")]),
        delta("tool_calls"),
        b"data: [DONE]\n\n",
    )
    events = told(answer)
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    text, first, second = events[-1]["response"]["output"]
    assert text["content"][0]["text"] == "so "
    assert (first["call_id"], first["name"], first["arguments"]) == ("c1", "f", '{"a":1}')
    assert (second["call_id"], second["arguments"], second["status"]) == ("c2", "{}", "completed")
    assert [event["output_index"] for event in events if event["type"].endswith("item.done")] == [0, 1, 2]


@pytest.mark.parametrize(("finish", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_an_answer_cut_at_its_limit_says_so_and_one_without_a_word_is_one(finish: str, status: str) -> None:
    events = told(Heard(streamed=True).hear(delta(finish), b"data: [DONE]\n\n"))
    last = events[-1]["response"]
    assert (events[-1]["type"], last["status"]) == (f"response.{status}", status)
    assert last["incomplete_details"] == ({"reason": "max_output_tokens"} if finish == "length" else None)
    assert [item["content"][0]["text"] for item in last["output"]] == [""]


async def test_a_whole_answer_that_cannot_be_read_is_an_error_and_recorded_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeBackend, "_body", lambda *_: b'{"choices": []}')
    async with TestBed() as bed:
        answer = await bed.ask(asked(), PATH)
        assert (answer.status, answer.error["code"]) == (502, "engine_failed")
        assert answer.headers["x-slackline-instance"] in ("e1", "e2")
        (record,) = bed.sink.records
        assert (record.outcome, record.error_code, record.attempts) == (Outcome.FAILED, "engine_failed", 1)
        assert bed.gateway.scheduler.dispatcher.fleet(0.0)[0].running == 0


async def test_a_stream_that_cannot_be_read_fails_at_once_and_is_recorded_as_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def event(fake: FakeBackend, call: UpstreamCall, index: int) -> bytes:
        text = b'"t"' if index < 2 else b"5"
        return b'data: {"choices":[{"index":0,"delta":{"content":%s}}]}\n\n' % text

    monkeypatch.setattr(FakeBackend, "_event", event)
    async with TestBed() as bed:
        events = told(await bed.ask(asked(stream=True), PATH))
        assert [event["type"] for event in events[-2:]] == ["response.failed", "error"]
        assert events[-2]["response"]["output"][0]["content"][0]["text"] == "tt"
        (record,) = bed.sink.records
        assert (record.outcome, record.error_code) == (Outcome.CUT, "engine_failed")
        await until_on_loop(lambda: bed.backend("e1").aborted + bed.backend("e2").aborted != [])


@pytest.mark.parametrize(
    "chunk",
    [
        *("5", '{"choices": 7}', '{"choices": [[]]}', '{"choices": [{"delta": "x"}]}'),
        '{"choices": [{"delta": {"content": 5}}]}',
        '{"choices": [{"delta": {"tool_calls": [{"index": "no"}]}}]}',
    ],
)
def test_what_came_before_an_unreadable_event_is_told_with_the_error(chunk: str) -> None:
    heard = Heard(streamed=True)
    with pytest.raises(UnreadableAnswer):
        heard.hear(delta(None, content="a") + b"data: %s\n\n" % chunk.encode())
    events = told(heard.hear(ApiError("engine_failed", "It cannot be read.").event()))
    assert [event["type"] for event in events[-2:]] == ["response.failed", "error"]
    assert events[-2]["response"]["output"][0]["content"][0]["text"] == "a"


async def test_a_streamed_response() -> None:
    async with TestBed() as bed:
        answer = await bed.ask(asked(stream=True), PATH)
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = told(answer)
        assert [event["type"] for event in events] == [
            *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
            *["response.output_text.delta"] * 4,
            *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
            "response.completed",
        ]
        text = "".join(event["delta"] for event in events if event["type"].endswith("text.delta"))
        assert text == events[-4]["text"] == "t0 t1 t2 t3 "
        last = events[-1]["response"]
        assert last["output"][0]["content"][0]["text"] == text
        assert (last["usage"]["input_tokens"], last["usage"]["output_tokens"]) == (8, 4)
        assert events[0]["response"]["status"] == "in_progress"
        assert {event["item_id"] for event in events if "item_id" in event} == {last["output"][0]["id"]}
        (record,) = bed.sink.records
        assert (record.outcome, record.judged_by, record.output_tokens) == (Outcome.OK, "tokens", 4)


async def test_events_leave_as_tokens_come() -> None:
    async with TestBed() as bed:
        bed.every(Script(hang_after=2))
        client = bed.send(asked(stream=True), PATH)
        await until_on_loop(lambda: client.answer.body.count(b"event: response.output_text.delta") == 2)
        assert not client.answer.ended.is_set(), "the engine has more to say"
        await client.hang_up()
        await until_on_loop(lambda: bed.backend("e1").aborted + bed.backend("e2").aborted != [])


async def test_an_engine_that_dies_fails_the_response_and_then_says_the_error() -> None:
    async with TestBed() as bed:
        bed.every(Script(cut_after=2))
        events = told(await bed.ask(asked(stream=True), PATH))
        failed, error = events[-2:]
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        assert failed["response"]["error"]["code"] == "engine_failed"
        assert failed["response"]["output"][0]["content"][0]["text"] == "t0 t1 "
        assert (error["type"], error["code"], error["error"]["code"]) == ("error", "engine_failed", "engine_failed")
        assert bed.sink.records[0].outcome == Outcome.CUT


@pytest.mark.parametrize("stream", [True, False])
async def test_refusals_have_the_shape_of_errors_everywhere(stream: bool) -> None:
    async with TestBed(snapshot(())) as bed:
        answer = await bed.ask(asked(stream=stream), PATH)
        assert (answer.status, answer.error["code"]) == (503, "no_capacity")
        assert "retry-after" in answer.headers
    async with TestBed() as bed:
        bed.every(Script(refuse_status=400))
        answer = await bed.ask(asked(stream=stream), PATH)
        assert (answer.status, answer.error["code"]) == (400, "invalid_value")
