"""Requests with a `thinking_deadline`: through a gateway, from their fields to their records."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web

from controller.core.snapshot import Entitlements
from controller.core.types import InstanceSpec
from controller.wording.misses import why_missed
from tests.api.openai.gateways import TestBed, completion, settled, snapshot
from tests.api.openai.protocol.responses import told
from tests.api.openai.servers import ServerBed
from tests.waiting import until_on_loop
from workers.backends.fake import Script

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
THINKS = Script(tokens=6, reasoning=4, token_delay_s=0.05)


def chat(**changes):
    said = [{"role": "user", "content": "hello"}]
    return {"model": "demo", "messages": said, "stream": True, "thinking_deadline": 5, **changes}


def one_slot():
    found = snapshot(["e1"])
    return replace(found, instances=(replace(found.instances[0], max_num_seqs=1),))


async def recorded(bed, body, script=THINKS, path=CHAT):
    bed.every(script)
    answer = await bed.ask(body, path)
    assert answer.status == 200, answer.body
    await until_on_loop(lambda: bed.sink.records)
    return bed.sink.records.pop()


async def test_the_first_token_after_the_reasoning_is_what_is_due():
    async with TestBed() as bed:
        record = await recorded(bed, chat(target_tbt=1))
        assert (record.target_thinking_s, record.reasoning_tokens, record.output_tokens) == (5, 4, 6)
        assert record.first_answer_s >= record.ttft_s + 0.2
        assert record.tpot_s == pytest.approx(record.token_times[-1] - record.first_answer_s, abs=1e-5)
        assert (record.ttft_met, record.tpot_met, record.attained, record.goodput_tokens) == (True, True, True, 6)


async def test_it_is_missed_though_the_first_token_came_in_time():
    async with TestBed() as bed:
        record = await recorded(bed, chat(thinking_deadline=0.15, target_tbt=1))
        assert record.ttft_s < 0.15 < record.first_answer_s
        assert (record.ttft_met, record.tpot_met, record.attained) == (False, True, False)
        assert record.goodput_tokens == 1, "the second token of the answer is due a second later"
        (window,) = bed.gateway.ledger.windows.view(bed.gateway.clock(), {}, {})
        assert (window["tenant"], window["miss_reason"]) == ("acme", "slow_thinking")


async def test_reasoning_that_never_ends_misses_it():
    async with TestBed() as bed:
        record = await recorded(bed, chat(), Script(tokens=4, reasoning=4))
        assert (record.first_answer_s, record.ttft_met, record.attained) == (None, False, False)
        assert (record.reasoning_tokens, record.goodput_tokens) == (4, 0)


async def test_slow_reasoning_costs_no_token_time_and_a_slow_answer_does():
    slow = Script(tokens=6, reasoning=4, token_delay_s=0.08)
    async with TestBed() as bed:
        assert (await recorded(bed, chat(target_tbt=0.5), slow)).attained
        record = await recorded(bed, chat(target_tbt=0.02), slow)
        assert (record.ttft_met, record.tpot_met, record.attained) == (True, False, False)


async def test_a_model_that_does_not_reason_is_due_with_its_first_token():
    async with TestBed() as bed:
        record = await recorded(bed, chat(), Script())
        assert (record.reasoning_tokens, record.first_answer_s, record.attained) == (0, record.ttft_s, True)


async def test_without_it_the_first_token_is_due_as_before_and_reasoning_is_recorded():
    async with TestBed() as bed:
        record = await recorded(bed, chat(thinking_deadline=None, target_ttft=0.15, target_tbt=1))
        assert (record.target_thinking_s, record.reasoning_tokens, record.attained) == (None, 4, True)
        assert record.first_answer_s > 0.15


async def test_responses_have_it_too():
    async with TestBed() as bed:
        bed.every(THINKS)
        body = {"model": "demo", "input": "hello", "stream": True, "thinking_deadline": 5, "target_tbt": 1}
        answer = await bed.ask(body, RESPONSES)
        assert told(answer)[-1]["response"]["output"][0]["content"][0]["text"].strip() == "t4 t5"
        await until_on_loop(lambda: bed.sink.records)
        (record,) = bed.sink.records
        assert (record.target_thinking_s, record.reasoning_tokens, record.attained) == (5, 4, True)


@pytest.mark.parametrize(
    ("path", "body", "what"),
    [
        (CHAT, chat(stream=False), "stream"),
        (RESPONSES, {"model": "demo", "input": "hello", "thinking_deadline": 5}, "stream"),
        ("/v1/completions", completion(stream=True, thinking_deadline=5), "chats and responses"),
        (CHAT, chat(target_ttft=1), "target_ttft"),
        (CHAT, chat(deadline=4), "deadline"),
        (CHAT, chat(thinking_deadline=0), "positive"),
        (CHAT, chat(thinking_deadline="soon"), "number"),
        (CHAT, chat(thinking_deadline=1e9), "at most"),
    ],
)
async def test_what_cannot_be_is_refused_and_named(path, body, what):
    async with TestBed() as bed:
        answer = await bed.ask(body, path)
        assert (answer.status, answer.error["param"]) == (400, "thinking_deadline")
        assert what in answer.error["message"]
        assert [call for name in ("e1", "e2") for call in bed.backend(name).calls] == []


async def test_it_does_not_reach_the_engine_and_a_tenant_may_not_ask_for_less_than_its_first_tokens():
    async with TestBed() as bed:
        await recorded(bed, chat())
        (call,) = [call for name in ("e1", "e2") for call in bed.backend(name).calls]
        assert "thinking_deadline" not in json.loads(call.head + b"}")
        assert call.targets.ttft_s == 5
        found = bed.gateway.snapshot
        strict = replace(found.tenants[0], entitled=Entitlements(tightest_ttft_s=6))
        bed.gateway.configure(replace(found, tenants=(strict,)))
        refused = await bed.ask(chat(), CHAT)
        assert (refused.status, refused.error["param"]) == (403, "thinking_deadline")


async def test_it_waits_in_the_queue_by_that_deadline():
    """Its class has 2 s to the first token; one with more time to think goes after one of that class."""
    async with TestBed(one_slot()) as bed:
        bed.every(Script(hang_after=1), Script())
        busy = bed.send(completion(stream=True))
        await until_on_loop(lambda: bed.backend("e1").running)
        clients = [bed.send(chat(thinking_deadline=left), CHAT) for left in (9, 4, None)]
        await settled()
        await busy.hang_up()
        names = [(await client.done()).headers["x-slackline-request-id"] for client in clients]
        served = [call.request_id for call in bed.backend("e1").calls][1:]
        assert served == [names[2], names[1], names[0]]


async def test_equal_requests_that_share_a_call_have_its_reasoning():
    async with TestBed() as bed:
        bed.every(THINKS)
        body = chat(share_call=True, temperature=0, target_tbt=1)
        await asyncio.gather(bed.ask(body, CHAT), bed.ask({**body, "thinking_deadline": 0.15}, CHAT))
        await until_on_loop(lambda: len(bed.sink.records) == 2)
        found = {record.target_thinking_s: record for record in bed.sink.records}
        assert {record.reasoning_tokens for record in found.values()} == {4}
        assert [found[due].attained for due in (5, 0.15)] == [True, False]
        assert sorted(record.attempts for record in found.values()) == [0, 1]


# ---- what reasoning takes -------------------------------------------------------------------------------------------


async def test_the_first_token_is_due_earlier_by_what_reasoning_takes():
    async with TestBed() as bed:
        first = await recorded(bed, chat(target_tbt=1))
        second = await recorded(bed, chat(target_tbt=1))
        assert (first.target_ttft_s, second.target_thinking_s) == (5, 5)
        assert 0.5 <= second.target_ttft_s < 5 - 0.2
        (step,) = [step for step in second.decisions if step["kind"] == "slo"]
        assert step["figures"]["thinking_s"] == pytest.approx(5 - second.target_ttft_s, abs=1e-3)
        calls = [call for name in ("e1", "e2") for call in bed.backend(name).calls]
        assert {call.targets.ttft_s for call in calls} == {5, second.target_ttft_s}, "engines hear it"


async def test_a_pace_that_cannot_be_met_is_refused_though_the_model_reasons():
    async with TestBed() as bed:
        bed.gateway.thinking.observe("acme", "demo", 0.001)
        answer = await bed.ask(chat(target_tbt=1e-6), CHAT)
        assert (answer.status, answer.error["param"]) == (429, "target_tbt")


async def test_long_reasoning_is_the_cause_however_early_it_was_to_begin():
    """The first token's target is cut to a tenth of the deadline, and half of that is spent in the queue."""
    async with TestBed(one_slot()) as bed:
        bed.gateway.thinking.observe("acme", "demo", 60.0)
        bed.every(Script(tokens=2, token_delay_s=0.3), replace(THINKS, token_delay_s=0.3))
        busy = bed.send(completion(stream=True, target_ttft=9, target_tbt=9))
        await until_on_loop(lambda: bed.backend("e1").running)
        answers = await asyncio.gather(busy.done(), bed.ask(chat(thinking_deadline=1.2, target_tbt=1), CHAT))
        await until_on_loop(lambda: len(bed.sink.records) == 2)
        record = next(each for each in bed.sink.records if each.target_thinking_s)
        assert (answers[1].status, record.ttft_met) == (200, False)
        assert record.target_ttft_s / 2 < record.queue_s < 0.6
        windows = bed.gateway.ledger.windows.view(bed.gateway.clock(), {}, {})
        assert "slow_thinking" in {each["miss_reason"] for each in windows}


async def test_a_late_sharer_does_not_teach_how_long_reasoning_takes():
    """Most of the reasoning was out before it came."""
    body = chat(temperature=0, share_call=True)
    async with TestBed() as bed:
        bed.every(THINKS)
        first = bed.send(body, CHAT)
        await until_on_loop(lambda: len(first.answer.events) >= 2)
        late = bed.send(body, CHAT)
        await settled()
        await first.hang_up()
        await late.done()
        await until_on_loop(lambda: bed.sink.records)
        (record,) = [each for each in bed.sink.records if each.outcome == "ok"]
        assert (record.ttft_s, len(bed.backend("e1").calls)) == (0.0, 1)
        assert bed.gateway.thinking.expected_s("acme", "demo") == 0.0


async def test_what_reasons_long_goes_before_what_is_due_earlier():
    async with TestBed(one_slot()) as bed:
        bed.gateway.thinking.observe("acme", "demo", 2.0)
        bed.every(Script(hang_after=1), Script())
        busy = bed.send(completion(stream=True))
        await until_on_loop(lambda: bed.backend("e1").running)
        clients = [bed.send(chat(thinking_deadline=None), CHAT), bed.send(chat(thinking_deadline=4), CHAT)]
        await settled()
        await busy.hang_up()
        names = [(await client.done()).headers["x-slackline-request-id"] for client in clients]
        assert [call.request_id for call in bed.backend("e1").calls][1:] == names[::-1]


async def test_a_guess_of_its_reasoning_refuses_nothing():
    """Its first token would be due before any engine could send it."""
    async with TestBed() as bed:
        bed.gateway.thinking.observe("acme", "demo", 60.0)
        body = chat(thinking_deadline=0.2)
        body["messages"] = [{"role": "user", "content": "word " * 700}]
        record = await recorded(bed, body, Script())
        assert (record.outcome, record.may_defer, record.target_ttft_s) == ("ok", False, pytest.approx(0.02))


@pytest.mark.parametrize("known_s", [0.0, 0.001])
async def test_what_cannot_be_met_even_without_reasoning_is_refused_and_named(known_s):
    async with TestBed() as bed:
        if known_s:
            bed.gateway.thinking.observe("acme", "demo", known_s)
        body = chat(thinking_deadline=0.0001, messages=[{"role": "user", "content": "word " * 700}])
        answer = await bed.ask(body, CHAT)
        assert (answer.status, answer.error["code"]) == (429, "slo_infeasible")
        assert answer.error["message"].endswith("Raise thinking_deadline.")
        await until_on_loop(lambda: bed.sink.records)
        assert "its thinking deadline was" in why_missed(bed.sink.records[0])[0]


# ---- over HTTP ------------------------------------------------------------------------------------------------------


def event(delta, finish=None):
    """As vLLM and SGLang send it."""
    chunk = {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]}
    chunk["choices"][0] |= {"logprobs": None, "finish_reason": finish}
    return b"data: %s\n\n" % json.dumps(chunk, separators=(",", ":")).encode()


VLLM = (
    {"role": "assistant", "content": ""},
    {"reasoning": "hm"},
    {"reasoning": " so"},
    {"content": "It is"},
    {"content": " 4"},
)
SILENT = (VLLM[0], {"content": ""}, *VLLM[1:])  # a token without text comes before the reasoning
PIECES = ((None, "hm"), (None, " so"), ("It is", None), (" 4", None))
OTHERS = {"role": None, "tool_calls": None}
SGLANG = (VLLM[0], *({**OTHERS, "content": text, "reasoning_content": thought} for text, thought in PIECES))
CALLS = (*VLLM[:3], {"tool_calls": [{"index": 0, "id": "x", "function": {"name": "add", "arguments": ""}}]}, VLLM[4])


async def quiet(request):
    return web.Response(text="vllm:num_requests_running 0\n")


class Reasons:
    """A server that reasons, as its wire shows it: each event after `APART_S`."""

    APART_S = 0.05

    def __init__(self, deltas):
        self.deltas = deltas

    async def answer(self, request):
        await request.read()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for delta in self.deltas:
            await response.write(event(delta))
            await asyncio.sleep(self.APART_S)
        usage = {"prompt_tokens": 8, "completion_tokens": 4, "total_tokens": 12}
        told = b'data: {"choices":[],"usage":%s}\n\n' % json.dumps(usage).encode()
        await response.write(event({}, "stop") + told + b"data: [DONE]\n\n")
        return response


@pytest.mark.parametrize(
    ("deltas", "reasoning"),
    [(VLLM, 2), (SGLANG, 2), (CALLS, 2), (SILENT, 3)],
    ids=["vLLM", "SGLang", "tool call", "silent"],
)
async def test_what_a_server_streams_as_reasoning_is_judged_as_such(deltas, reasoning):
    app = web.Application()
    app.router.add_get("/health", quiet)
    app.router.add_get("/metrics", quiet)
    app.router.add_post(CHAT, Reasons(deltas).answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    spec = InstanceSpec("e1", "demo", url=url, backend="vllm")
    async with aiohttp.ClientSession() as session, ServerBed([spec], session) as bed:
        answer = await bed.ask(chat(target_tbt=1), CHAT)
        assert answer.events[-1] == "[DONE]", answer.body
        await until_on_loop(lambda: bed.sink.records)
        (record,) = bed.sink.records
        assert (record.reasoning_tokens, record.output_tokens, record.attained) == (reasoning, 4, True)
        assert record.first_answer_s - record.ttft_s >= 0.09
    await runner.cleanup()
