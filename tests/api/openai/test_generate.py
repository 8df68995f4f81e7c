"""Requests through a whole gateway over fake engines: answers, retries, cuts, hang-ups, refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from api.openai.status import fleet_message, gauges, windows
from controller.core import events as ev
from controller.core.snapshot import ClassConfig, TenantConfig
from controller.core.types import Outcome
from tests.api.openai.gateways import TestBed, completion, key_config, snapshot
from tests.waiting import until_on_loop
from workers.backends.base import AnswerChunk, UpstreamCall
from workers.backends.fake import FakeBackend, Script

CHAT_BODY = {"model": "gpt", "messages": [{"role": "user", "content": "hello"}]}


async def test_a_streamed_answer_is_relayed_and_recorded() -> None:
    async with TestBed() as bed:
        answer = await bed.ask(completion(stream=True))
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-slackline-class"] == "chat"
        assert answer.headers["x-slackline-instance"] in ("e1", "e2")
        assert len(answer.events) == 5
        assert answer.events[-1] == "[DONE]"
        (record,) = bed.sink.records
        assert record.id == answer.headers["x-slackline-request-id"]
        assert (record.outcome, record.attained, record.judged_by) == (Outcome.OK, True, "tokens")
        assert (record.prompt_tokens, record.output_tokens, record.attempts) == (8, 4, 1)
        assert record.ttft_s is not None
        assert [step["kind"] for step in record.decisions] == ["slo", "dispatch"]


async def test_a_whole_answer_is_judged_end_to_end() -> None:
    async with TestBed() as bed:
        answer = await bed.ask(CHAT_BODY, "/v1/chat/completions")
        assert json.loads(answer.body)["usage"]["completion_tokens"] == 4
        (record,) = bed.sink.records
        assert (record.judged_by, record.ttft_s, record.output_tokens) == ("e2e", None, 4)


async def test_an_engine_that_sends_much_before_its_first_token_is_given_up() -> None:
    """What waits for a first token is in memory, since the request may still go elsewhere."""
    pieces = 0

    async def no_token(call: UpstreamCall, script: Script) -> AsyncIterator[AnswerChunk]:
        nonlocal pieces
        for _ in range(64):  # four times the bound, and then a whole answer
            pieces += 1
            yield AnswerChunk("data", b": %s\n\n" % (b"x" * (64 << 10)))
        async for chunk in FakeBackend._answer(bed.backend("e1"), call, script):
            yield chunk

    async with TestBed() as bed:
        for name in ("e1", "e2"):
            backend: Any = bed.backend(name)
            backend._answer = lambda call, script, plain=backend._answer: (plain if pieces else no_token)(call, script)
        answer = await bed.ask(completion(stream=True))
        assert (answer.status, len(answer.events), b"xx" in answer.body) == (200, 5, False)
        assert pieces < 20
        (record,) = bed.sink.records
        assert (record.outcome, record.attempts) == (Outcome.OK, 2)


async def test_the_usage_event_comes_only_when_asked_for() -> None:
    async with TestBed() as bed:
        plain = await bed.ask(completion(stream=True))
        asked = await bed.ask(completion(stream=True, stream_options={"include_usage": True}))
        assert not any('"usage"' in event for event in plain.events)
        assert json.loads(asked.events[-2])["usage"]["completion_tokens"] == 4


async def test_the_rank_and_our_id_go_upstream_and_slo_fields_do_not() -> None:
    async with TestBed() as bed:
        answer = await bed.ask(completion(slo_class="chat", priority=3, ignore_eos=True))
        (call,) = [call for name in ("e1", "e2") for call in bed.backend(name).calls]
        assert call.request_id == answer.headers["x-slackline-request-id"]
        assert json.loads(call.head + b"}") == {
            "model": "demo",
            "prompt": [1, 2, 3],
            "max_tokens": 4,
            "ignore_eos": True,
        }
        assert isinstance(call.rank, int)


async def test_an_arrival_is_sent_at_once_when_the_fleet_has_room() -> None:
    """In the pass that is told of it, which runs in the next turn of the loop: no timer fires that fast."""
    async with TestBed() as bed:
        handle, passes, turns = bed.gateway.runtime._handle, [], 0

        def noted(events: Sequence[ev.Event], now: float) -> ev.Reply:
            reply = handle(events, now)
            passes.append(({type(event) for event in events}, {type(action) for action in reply.actions}))
            return reply

        bed.gateway.runtime._handle = noted
        client = bed.send(completion())
        while not bed.backend("e1").calls + bed.backend("e2").calls:
            await asyncio.sleep(0)
            turns += 1
        assert turns <= 5
        assert passes == [({ev.Arrived}, {ev.Send})]
        assert float((await client.done()).headers["x-slackline-queue-ms"]) >= 0.0


@pytest.mark.parametrize(
    "failing",
    [Script(unreachable=True), Script(refuse_status=503), Script(refuse_status=500), Script(cut_after=0)],
    ids=["unreachable", "overloaded", "error", "lost before the first token"],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_before_the_first_token_is_retried_elsewhere(failing: Script, stream: bool) -> None:
    async with TestBed() as bed:
        bed.backend("e1", failing)
        answer = await bed.ask(completion(stream=stream))
        assert answer.status == 200
        assert (len(bed.backend("e1").calls), len(bed.backend("e2").calls)) == (1, 1)
        (record,) = bed.sink.records
        assert (record.outcome, record.attempts, record.instance) == (Outcome.OK, 2, "e2")


async def test_a_failure_everywhere_is_an_error_and_a_miss() -> None:
    async with TestBed() as bed:
        bed.every(Script(refuse_status=500))
        answer = await bed.ask(completion(stream=True))
        assert answer.status == 503
        assert answer.error["code"] == "no_capacity"
        assert "retry-after" in answer.headers
        (record,) = bed.sink.records
        assert (record.outcome, record.attained, record.error_code) == (Outcome.FAILED, False, "no_capacity")


async def test_an_engine_that_dies_after_the_first_token_ends_the_stream_with_an_error_event() -> None:
    async with TestBed() as bed:
        bed.every(Script(cut_after=2))
        answer = await bed.ask(completion(stream=True))
        assert answer.status == 200
        assert len(answer.events) == 3
        assert json.loads(answer.events[-1])["error"]["code"] == "engine_failed"
        assert "[DONE]" not in answer.events
        (record,) = bed.sink.records
        assert (record.outcome, record.output_tokens, record.attempts) == (Outcome.CUT, 2, 1)


async def test_the_engines_refusal_of_a_request_is_passed_on_in_our_shape() -> None:
    async with TestBed() as bed:
        bed.every(Script(refuse_status=400))
        answer = await bed.ask(completion())
        assert (answer.status, answer.error["code"]) == (400, "invalid_value")
        assert answer.error.keys() == {"message", "type", "param", "code"}
        (record,) = bed.sink.records
        assert (record.outcome, record.error_code, record.attempts) == (Outcome.REFUSED, "engine_rejected", 1)
        (row,) = windows(bed.gateway, bed.gateway.clock())
        assert (row["finished"], row["refused"], row["cancelled"], row["miss_reason"]) == (0, 0, 1, "")


@pytest.mark.parametrize("after", [0, 2])
async def test_a_client_that_hangs_up_cancels_upstream_at_once(after: int) -> None:
    async with TestBed() as bed:
        bed.every(Script(hang_after=after))
        client = bed.send(completion(stream=True))
        await until_on_loop(lambda: any(bed.backend(name).running for name in ("e1", "e2")))
        if after:
            await until_on_loop(lambda: client.answer.body.count(b"data:") == after)
        await client.hang_up()
        await until_on_loop(lambda: not any(bed.backend(name).running for name in ("e1", "e2")))
        aborted = bed.backend("e1").aborted + bed.backend("e2").aborted
        (record,) = bed.sink.records
        assert aborted == [record.id]
        assert (record.outcome, record.attained) == (Outcome.CANCELLED, False)
        assert not bed.gateway.runtime.requests


async def test_a_queued_request_whose_client_hangs_up_never_reaches_an_engine() -> None:
    async with TestBed(snapshot(("e1",)), policy="fcfs_window") as bed:
        bed.every(Script(hang_after=0))
        clients = [bed.send(completion(stream=True)) for _ in range(60)]
        await until_on_loop(lambda: bed.backend("e1").running + len(bed.gateway.scheduler.dispatcher.queue()) == 60)
        running = len(bed.backend("e1").calls)
        assert 0 < running < 60
        await clients[-1].hang_up()
        assert len(bed.backend("e1").calls) == running
        assert bed.sink.records[-1].queue_s is None
        await asyncio.gather(*(client.hang_up() for client in clients[:-1]))
        assert [record.outcome for record in bed.sink.records] == [Outcome.CANCELLED] * 60
        assert len(bed.gateway.scheduler.dispatcher.queue()) == 0


async def test_an_instance_that_goes_down_loses_no_request() -> None:
    async with TestBed(snapshot(("e1",))) as bed:
        bed.backend("e1", Script(hang_after=2), Script(hang_after=0))
        started, waiting = bed.send(completion(stream=True)), bed.send(completion(stream=True))
        await until_on_loop(lambda: started.answer.body.count(b"data:") == 2)
        bed.gateway.configure(snapshot(("e1", "e2"), version=2))
        await until_on_loop(lambda: bed.gateway.fleet.seats["e2"].up)
        bed.gateway.runtime.instance_down("e1", "killed")
        assert json.loads((await started.done()).events[-1])["error"]["code"] == "engine_failed"
        assert (await waiting.done()).events[-1] == "[DONE]"
        outcomes = {record.outcome: record.instance for record in bed.sink.records}
        assert outcomes == {Outcome.CUT: "e1", Outcome.OK: "e2"}
        assert bed.backend("e1").running == 0


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (completion(model="nobody"), 404, "model_not_found"),
        (completion(target_ttft=-1), 400, "invalid_slo"),
        (completion(slo_class="nobody"), 400, "invalid_slo"),
        (completion(prompt=list(range(2000))), 400, "context_length_exceeded"),
        (completion(deadline=0.0001, target_ttft=0.0001), 429, "slo_infeasible"),
        (completion(prompt="x" * (3 << 20)), 413, "request_too_large"),
    ],
    ids=["json", "model", "slo", "class", "context", "infeasible", "size"],
)
async def test_bad_input_queues_nothing(body: Any, status: int, code: str) -> None:
    async with TestBed() as bed:
        answer = await bed.ask(body)
        assert (answer.status, answer.error["code"]) == (status, code)
        assert ("retry-after" in answer.headers) == (status == 429)
        # Sent again, it would be as infeasible, and OpenAI's clients would wait Retry-After twice to learn that.
        assert answer.headers.get("x-should-retry") == ("false" if status == 429 else None)
        assert not bed.gateway.runtime.requests
        assert not bed.backend("e1").calls + bed.backend("e2").calls


async def test_a_dispatcher_that_fails_answers_its_arrivals_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with TestBed() as bed:
        handle, calls = bed.gateway.scheduler.dispatcher.handle, []

        def fails_once(events: Any, now: float) -> Any:
            calls.append(events)
            if len(calls) == 1:
                raise ZeroDivisionError
            return handle(events, now)

        monkeypatch.setattr(bed.gateway.scheduler.dispatcher, "handle", fails_once)
        answer = await bed.ask(completion())
        assert (answer.status, answer.error["code"]) == (500, "internal_error")
        assert (await bed.ask(completion())).status == 200
        assert [record.outcome for record in bed.sink.records] == [Outcome.FAILED, Outcome.OK]


async def test_a_model_without_an_instance_has_no_capacity() -> None:
    async with TestBed(snapshot(())) as bed:
        answer = await bed.ask(completion())
        assert (answer.status, answer.error["code"]) == (503, "no_capacity")


async def test_waiting_longer_than_the_waiting_time_is_an_error_in_time() -> None:
    async with TestBed(snapshot(("e1",)), policy="fcfs_window") as bed:
        bed.every(Script(hang_after=0))
        clients = [bed.send(completion(stream=True, waiting_time=0.05)) for _ in range(60)]
        await until_on_loop(lambda: any(client.answer.status for client in clients))
        expired = [client for client in clients if client.answer.status]
        assert expired[0].answer.status == 504
        assert expired[0].answer.error["code"] == "waiting_time_exceeded"
        for client in clients:
            await client.hang_up()


@pytest.mark.parametrize(
    ("said", "status"),
    [({"target_ttft": 3.0}, 200), ({"target_ttft": 3.0, "waiting_time": 0.2}, 504), ({}, 504)],
    ids=["its own target", "its own target and waiting time", "the class's"],
)
async def test_a_request_behind_a_full_engine_waits_as_long_as_its_own_target(
    said: dict[str, float], status: int
) -> None:
    short = ClassConfig("chat", None, 0.2, 0.1, None, 0.2, 0.95, 1.0)
    fleet = snapshot(("e1",), classes=(short,))
    async with TestBed(replace(fleet, instances=(replace(fleet.instances[0], max_num_seqs=1),))) as bed:
        bed.every(Script(first_delay_s=0.6))
        first = bed.send(completion(stream=True, target_ttft=3.0))
        await until_on_loop(lambda: bool(bed.backend("e1").calls))
        answer = await bed.ask(completion(stream=True, **said))
        assert answer.status == status
        await first.answer.ended.wait()
        assert first.answer.status == 200


async def test_a_revoked_key_is_refused_with_the_next_request() -> None:
    async with TestBed() as bed:
        assert (await bed.ask(completion())).status == 200
        bed.gateway.configure(snapshot(keys=(key_config("sk-other"),), version=2))
        answer = await bed.ask(completion())
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")


async def test_over_quota_is_refused_with_a_hint_and_recorded() -> None:
    config = snapshot(tenants=(TenantConfig(1, "acme", "chat", rpm=1),))
    async with TestBed(config) as bed:
        assert (await bed.ask(completion())).status == 200
        answer = await bed.ask(completion())
        assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded")
        assert int(answer.headers["retry-after"]) >= 1
        assert [record.outcome for record in bed.sink.records] == [Outcome.OK, Outcome.REFUSED]
        assert answer.headers["x-slackline-request-id"] == bed.sink.records[-1].id
        assert answer.headers["x-slackline-class"] == "chat"
        page = (await bed.ask(b"", "/metrics", method="GET")).body.decode()
        assert 'slackline_requests_total{code="rate_limit_exceeded",outcome="refused"' in page
        assert "slackline_api_errors_total{" not in page


async def test_a_tenant_with_a_quota_is_told_what_is_left_of_it() -> None:
    config = snapshot(tenants=(TenantConfig(1, "acme", "chat", rpm=2, tpm=100),))
    async with TestBed(config) as bed:
        first, second, refused = [await bed.ask(completion()) for _ in range(3)]
        left = [answer.headers["x-ratelimit-remaining-requests"] for answer in (first, second, refused)]
        assert (left, first.headers["x-ratelimit-limit-requests"]) == (["1", "0", "0"], "2")
        assert 20 < float(first.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 30
        assert int(first.headers["x-ratelimit-remaining-tokens"]) < 100
        assert refused.status == 429
        assert refused.headers["x-request-id"] == refused.headers["x-slackline-request-id"]
    async with TestBed() as bed:
        assert not any(name.startswith("x-ratelimit") for name in (await bed.ask(completion())).headers)


async def test_what_has_no_record_is_counted_as_an_api_error() -> None:
    async with TestBed() as bed:
        await bed.ask(completion(model="nobody"))
        page = (await bed.ask(b"", "/metrics", method="GET")).body.decode()
        assert 'slackline_api_errors_total{code="model_not_found"} 1.0' in page


async def test_quotas_are_given_back_when_requests_end() -> None:
    config = snapshot(tenants=(TenantConfig(1, "acme", "chat", max_concurrency=1),))
    async with TestBed(config) as bed:
        bed.every(Script(), Script(refuse_status=400), Script())
        for _ in range(6):
            assert (await bed.ask(completion())).status in (200, 400)
        assert bed.gateway.quotas.active("acme") == 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/nothing", 404),
        ("GET", "/v1/models/nobody", 404),
        ("GET", "/v1/models/gpt", 200),
        ("GET", "/v1/models", 200),
        ("GET", "/healthz", 200),
        ("GET", "/metrics", 200),
    ],
)
async def test_routes(method: str, path: str, status: int) -> None:
    async with TestBed() as bed:
        answer = await bed.ask(b"", path, method=method)
        assert answer.status == status


async def test_models_need_a_key_and_name_aliases() -> None:
    async with TestBed() as bed:
        assert (await bed.ask(b"", "/v1/models", key="sk-wrong", method="GET")).status == 401
        cards = json.loads((await bed.ask(b"", "/v1/models", method="GET")).body)["data"]
        assert [card["id"] for card in cards] == ["demo", "gpt"]


async def test_metrics_tell_attainment_queue_and_decisions() -> None:
    async with TestBed() as bed:
        await bed.ask(completion())
        bed.gateway.instruments.watch(lambda: list(_gauges(bed)))
        page = (await bed.ask(b"", "/metrics", method="GET")).body.decode()
        assert 'slackline_attainment_ratio{slo_class="chat",tenant="acme"} 1.0' in page
        assert 'slackline_requests_total{code="",outcome="ok",slo_class="chat",tenant="acme"} 1.0' in page
        who = 'slo_class="chat",tenant="acme"'
        assert f'slackline_decisions_total{{kind="dispatch",reason="fits_budget",{who}}} 1.0' in page
        (told,) = fleet_message(bed.gateway, 1, [])["decisions"]
        assert told == {"tenant": "acme", "slo_class": "chat", "kind": "dispatch", "reason": "fits_budget", "count": 1}
        assert f"slackline_queued_requests{{{who}}} 0.0" in page


def _gauges(bed: TestBed) -> Any:
    return gauges(bed.gateway)
