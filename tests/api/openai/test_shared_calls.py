"""Equal requests that share a call (`share_call`): through a gateway, from the requests to their records."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from dataclasses import replace

import pytest

from api.openai import shared_calls, status
from api.openai.workflows import Workflows
from tests.api.openai.gateways import TestBed, completion, key_config, settled, snapshot
from tests.api.openai.workflow_gateways import OTHER, config
from tests.waiting import until_on_loop
from workers.backends.fake import Script

SLOW = Script(first_delay_s=0.2, token_delay_s=0.01)
HANGS = Script(hang_after=2)


def shared(**changes):
    return completion(share_call=True, temperature=0, **changes)


def calls(bed):
    return [call for name in bed.gateway.fleet.backends for call in bed.backend(name).calls]


def running(bed):
    return sum(bed.backend(name).running for name in bed.gateway.fleet.backends)


def step(record, kind="share"):
    return next((step for step in record.decisions if step["kind"] == kind), None)


def one_slot(**changes):
    """A fleet with room for one request."""
    found = snapshot(["e1"], **changes)
    return replace(found, instances=(replace(found.instances[0], max_num_seqs=1),))


# ---- shared ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_ten_equal_requests_are_one_call_and_each_has_the_answer_and_a_record(stream):
    async with TestBed() as bed:
        bed.every(SLOW)
        answers = await asyncio.gather(*(bed.ask(shared(stream=stream)) for _ in range(10)))
        assert [answer.status for answer in answers] == [200] * 10
        assert len({answer.body for answer in answers}) == 1
        assert answers[0].events[-1] == "[DONE]" if stream else json.loads(answers[0].body)["choices"]
        assert len(calls(bed)) == 1, "engine_calls"
        await until_on_loop(lambda: len(bed.sink.records) == 10)
        records = bed.sink.records
        assert {record.id for record in records} == {answer.headers["x-slackline-request-id"] for answer in answers}
        assert {(record.outcome, record.output_tokens, record.prompt_tokens) for record in records} == {("ok", 4, 8)}
        assert sorted(record.attempts for record in records) == [0] * 9 + [1]
        first = next(record for record in records if record.attempts)
        others = [record for record in records if not record.attempts]
        assert step(first)["reason"] == "call_shared"
        assert step(first)["figures"] == {"sharing": 9}
        assert all(step(other)["reason"] == "shared_call" for other in others)
        assert {step(other)["figures"]["of_request"] for other in others} == {first.id}
        told = Counter(answer.headers.get("x-slackline-shared") for answer in answers)
        assert told == {first.id: 9, None: 1}
        assert (first.instance, len({record.instance for record in records})) == (calls_at(bed), 1)


def calls_at(bed):
    return next(name for name in bed.gateway.fleet.backends if bed.backend(name).calls)


async def test_the_order_of_the_fields_does_not_matter_and_chats_share_too():
    body = {"model": "gpt", "messages": [{"role": "user", "content": "hello"}], "seed": 7, "share_call": True}
    other = {"seed": 7, "share_call": True, "messages": [{"content": "hello", "role": "user"}], "model": "demo"}
    async with TestBed() as bed:
        bed.every(SLOW)
        path = "/v1/chat/completions"
        first, second = await asyncio.gather(bed.ask(body, path), bed.ask(other, path))
        assert (first.body, len(calls(bed))) == (second.body, 1)


async def test_one_that_comes_during_the_answer_gets_all_of_it():
    async with TestBed() as bed:
        bed.every(Script(tokens=5, token_delay_s=0.05))
        first = bed.send(shared(stream=True))
        await until_on_loop(lambda: first.answer.body.count(b"data:") >= 2)
        second = bed.send(shared(stream=True))
        assert (await first.done()).body == (await second.done()).body
        assert second.answer.events[0] == '{"choices":[{"index":0,"text":"t0 "}]}'
        assert len(calls(bed)) == 1
        await until_on_loop(lambda: len(bed.sink.records) == 2)
        late = next(record for record in bed.sink.records if not record.attempts)
        assert late.ttft_s < 0.04, "its first token was there when it came"
        assert late.queue_s == 0


async def test_one_that_comes_after_the_answer_is_computed_again():
    async with TestBed() as bed:
        await bed.ask(shared())
        await bed.ask(shared())
        assert len(calls(bed)) == 2
        assert all(step(record) is None and record.attempts == 1 for record in bed.sink.records)


async def test_requests_of_different_workflows_share_and_each_is_counted_to_its_own(monkeypatch):
    ended: list[tuple[bool, int]] = []
    count = Workflows.ended

    def counted(self, tenant, workflow, **told):
        ended.append((told["computed"], told["output_tokens"]))
        count(self, tenant, workflow, **told)

    monkeypatch.setattr(Workflows, "ended", counted)
    async with TestBed() as bed:
        bed.every(SLOW)
        metadata = [{"workflow_id": "a", "stage": "plan"}, {"workflow_id": "b"}]
        await asyncio.gather(*(bed.ask(shared(metadata=each, workflow_deadline=30)) for each in metadata))
        assert len(calls(bed)) == 1
        await until_on_loop(lambda: len(bed.sink.records) == 2)
        assert {(record.workflow, record.stage) for record in bed.sink.records} == {("a", "plan"), ("b", "")}
        tokens = next(record.output_tokens for record in bed.sink.records if record.attempts)
        assert sorted(ended) == [(False, 0), (True, tokens)], "an engine computed one of them"


# ---- not shared -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        completion(temperature=0),
        completion(temperature=0, share_call=False),
        shared(prompt=[1, 2, 4]),
        shared(max_tokens=5),
        shared(stream=True),
        shared(seed=1),
        shared(metadata={"trace": "x"}),
    ],
)
async def test_only_equal_requests_that_opted_in_share(other):
    async with TestBed() as bed:
        bed.every(SLOW)
        answers = await asyncio.gather(bed.ask(shared()), bed.ask(other))
        assert [answer.status for answer in answers] == [200, 200]
        assert len(calls(bed)) == 2
        assert not bed.gateway.shared_calls.shared


async def test_never_across_tenants():
    async with TestBed(config()) as bed:
        bed.every(SLOW)
        await asyncio.gather(bed.ask(shared()), bed.ask(shared(), key=OTHER))
        assert len(calls(bed)) == 2


async def test_no_tenants_name_makes_its_requests_equal_to_anothers():
    found = config()
    names = ("a", "a\0")
    tenants = tuple(replace(each, name=name) for each, name in zip(found.tenants, names, strict=True))
    keys = (key_config(tenant="a"), key_config(OTHER, id=2, tenant="a\0"))
    async with TestBed(replace(found, tenants=tenants, keys=keys)) as bed:
        bed.every(SLOW)
        await asyncio.gather(bed.ask(shared()), bed.ask(shared(), key=OTHER))
        assert len(calls(bed)) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"share_call": "yes"},
        {"share_call": 1},
        {"share_call": True},
        {"share_call": True, "temperature": 0.5},
        {"share_call": True, "seed": True},
        {"share_call": True, "seed": "7"},
    ],
)
async def test_what_has_more_than_one_answer_is_refused(changes):
    async with TestBed() as bed:
        answer = await bed.ask(completion(**changes))
        assert (answer.status, answer.error["param"]) == (400, "share_call")


async def test_the_field_does_not_reach_the_engine():
    async with TestBed() as bed:
        await bed.ask(shared())
        assert b"share_call" not in calls(bed)[0].head


# ---- one of them ends ----------------------------------------------------------------------------------------------


async def test_the_first_one_cancelled_does_not_end_the_second():
    async with TestBed() as bed:
        bed.every(Script(tokens=6, token_delay_s=0.05))
        first, second = bed.send(shared(stream=True, max_tokens=6)), bed.send(shared(stream=True, max_tokens=6))
        await until_on_loop(lambda: first.answer.body.count(b"data:") >= 2)
        await first.hang_up()
        answer = await second.done()
        assert answer.events[-1] == "[DONE]"
        assert len(answer.events) == 7
        await until_on_loop(lambda: len(bed.sink.records) == 2)
        gone, served = bed.sink.records
        assert (gone.outcome, gone.attempts, gone.output_tokens < 6) == ("cancelled", 0, True)
        assert step(gone)["figures"] == {"of_request": served.id}
        assert (served.outcome, served.attempts, served.output_tokens) == ("ok", 1, 6), "its tokens are its own now"
        assert not [name for each in bed.gateway.fleet.backends for name in bed.backend(each).aborted]


async def test_the_first_one_cancelled_in_the_queue_does_not_end_the_second():
    async with TestBed(one_slot()) as bed:
        bed.every(HANGS, Script())
        busy = bed.send(completion(stream=True))
        await until_on_loop(lambda: running(bed))
        first = bed.send(shared())
        await settled()
        second = bed.send(shared())
        await settled()
        await first.hang_up()
        await busy.hang_up()
        assert (await second.done()).status == 200
        assert len(calls(bed)) == 2


async def test_with_the_last_one_the_call_ends_at_its_engine():
    async with TestBed() as bed:
        bed.every(HANGS)
        clients = [bed.send(shared(stream=True)) for _ in range(3)]
        await until_on_loop(lambda: all(client.answer.body for client in clients))
        for client in clients:
            await client.hang_up()
        await until_on_loop(lambda: not running(bed))
        assert not bed.gateway.runtime.requests
        assert bed.gateway.quotas.active("acme") == 0
        assert [record.outcome for record in bed.sink.records] == ["cancelled"] * 3
        assert [record.attempts for record in bed.sink.records] == [0, 0, 1]
        bed.every(Script())
        assert (await bed.ask(shared())).status == 200, "nobody joins a call that has ended"


async def test_a_revoked_key_ends_its_own_request_alone():
    found = snapshot()
    both = replace(found, keys=(*found.keys, key_config(OTHER, id=2)))
    async with TestBed(both) as bed:
        bed.every(Script(tokens=6, token_delay_s=0.05))
        kept, ended = bed.send(shared(stream=True)), bed.send(shared(stream=True), key=OTHER)
        await until_on_loop(lambda: ended.answer.body)
        bed.gateway.configure(replace(found, version=2))
        assert (await kept.done()).events[-1] == "[DONE]"
        told = await ended.done()
        assert json.loads(told.events[-1])["error"]["code"] == "invalid_api_key"
        outcomes = {record.error_code: record.outcome for record in bed.sink.records}
        assert outcomes == {"": "ok", "invalid_api_key": "cut"}


async def test_a_cancelled_workflow_ends_its_own_request_alone():
    async with TestBed() as bed:
        bed.every(Script(first_delay_s=0.2))
        kept = bed.send(shared(metadata={"workflow_id": "a"}))
        ended = bed.send(shared(metadata={"workflow_id": "b"}))
        await until_on_loop(lambda: running(bed))
        bed.gateway.end_workflow("acme", "b", "tenant")
        told = await ended.done()
        assert (told.status, told.error["code"]) == (499, "cancelled")
        assert (await kept.done()).status == 200
        bed.gateway.end_workflow("other", "a", "tenant")


async def test_its_own_waiting_time_ends_one_that_would_wait_less():
    async with TestBed(one_slot()) as bed:
        bed.every(HANGS, Script())
        busy = bed.send(completion(stream=True))
        await until_on_loop(lambda: running(bed))
        patient, hasty = bed.send(shared(waiting_time=5)), bed.send(shared(waiting_time=0.2))
        told = await hasty.done()
        assert (told.status, told.error["code"]) == (504, "waiting_time_exceeded")
        await busy.hang_up()
        assert (await patient.done()).status == 200
        outcomes = {record.id: record.outcome for record in bed.sink.records}
        assert outcomes[told.headers["x-slackline-request-id"]] == "expired"
        assert told.error["message"].endswith("the only instance was busy. Raise waiting_time or retry later.")


async def test_the_call_waits_as_long_as_the_one_that_waits_longest():
    async with TestBed(one_slot()) as bed:
        bed.every(HANGS, Script())
        busy = bed.send(completion(stream=True))
        await until_on_loop(lambda: running(bed))
        hasty, patient = bed.send(shared(waiting_time=0.2)), bed.send(shared(waiting_time=5))
        assert (await hasty.done()).status == 504
        await busy.hang_up()
        assert (await patient.done()).status == 200


@pytest.mark.parametrize(("second", "told"), [({"workflow_deadline": 20}, True), ({}, False)])
async def test_the_engine_is_told_when_the_first_workflow_is_due_if_all_are_of_one(second, told):
    """The deadline of a step is a share of that, which alone refuses nothing."""
    async with TestBed(one_slot()) as bed:
        bed.every(HANGS, Script())
        busy = bed.send(completion(stream=True))
        await until_on_loop(lambda: running(bed))
        asked = shared(waiting_time=9, metadata={"workflow_id": "a"}, workflow_deadline=30, workflow_steps_left=3)
        waiting = [bed.send(asked), bed.send(shared(waiting_time=9, metadata={"workflow_id": "b"}, **second))]
        await settled()
        await busy.hang_up()
        assert [(await each.done()).status for each in waiting] == [200, 200]
        hints = calls(bed)[1].hints
        assert hints.workflow == "", "several may share it"
        if told:
            assert 15 < hints.workflow_s <= 20
        else:
            assert hints.workflow_s == math.inf


# ---- targets --------------------------------------------------------------------------------------------------------


async def test_a_queued_call_is_due_when_the_first_of_them_is():
    async with TestBed(one_slot()) as bed:
        bed.every(HANGS, Script())
        busy = bed.send(completion(stream=True))
        await until_on_loop(lambda: running(bed))
        relaxed = bed.send(shared(target_ttft=9, deadline=9))
        other = bed.send(completion(target_ttft=5, deadline=5))
        await settled()
        tight = bed.send(shared(target_ttft=3, deadline=4))
        await settled()
        (queued, _) = bed.gateway.scheduler.queue().ids()
        targets = bed.gateway.runtime.requests[queued].request.targets
        assert (targets.ttft_s, targets.deadline_s) == (pytest.approx(3, abs=0.1), pytest.approx(4, abs=0.1))
        await busy.hang_up()
        answers = [await client.done() for client in (relaxed, tight, other)]
        assert [answer.status for answer in answers] == [200] * 3
        served = [call.request_id for call in calls(bed)][1:]
        assert served.index(answers[1].headers["x-slackline-request-id"]) == 0, "before the one that was due earlier"
        deadlines = sorted(record.target_deadline_s for record in bed.sink.records if record.target_deadline_s)
        assert deadlines == [4, 5, 9], "each is judged by its own targets"


async def test_targets_that_cannot_be_met_cost_the_others_nothing():
    async with TestBed(one_slot()) as bed:
        bed.every(Script(first_delay_s=0.1))
        first = bed.send(shared())
        answers = await asyncio.gather(first.done(), bed.ask(shared(target_ttft=0.001, deadline=0.001, waiting_time=1)))
        assert [answer.status for answer in answers] == [200, 200]
        assert sorted(record.attained for record in bed.sink.records) == [False, True]


async def test_a_paused_call_stays_paused():
    async with TestBed(one_slot()) as bed:
        bed.every(HANGS, Script())
        busy = bed.send(completion(stream=True))
        await until_on_loop(lambda: running(bed))
        first = bed.send(shared())
        await settled()
        (queued,) = bed.gateway.scheduler.queue().ids()
        bed.gateway.scheduler.dispatcher.lanes["demo"].queue.pause(queued, True, bed.gateway.clock())
        second = bed.send(shared(target_ttft=1))
        await settled()
        assert bed.gateway.scheduler.queue().row(queued)["paused"]
        for client in (busy, first, second):
            await client.hang_up()


# ---- quotas, faults and bounds -------------------------------------------------------------------------------------


async def test_each_counts_as_a_request_and_the_tokens_count_once():
    found = snapshot()
    (acme,) = found.tenants
    async with TestBed(replace(found, tenants=(replace(acme, rpm=100, tpm=120),))) as bed:
        bed.every(SLOW)
        await asyncio.gather(*(bed.ask(shared()) for _ in range(10)))
        await until_on_loop(lambda: not bed.gateway.quotas.active("acme"))
        left = dict(bed.gateway.quotas.headers("acme"))
        assert int(left[b"x-ratelimit-remaining-requests"]) in (90, 91)
        assert 100 <= int(left[b"x-ratelimit-remaining-tokens"]) < 120, "12 of one call, not 12 of each"


async def test_requests_at_once_are_bounded_as_without_sharing():
    found = snapshot()
    (acme,) = found.tenants
    async with TestBed(replace(found, tenants=(replace(acme, max_concurrency=3),))) as bed:
        bed.every(SLOW)
        answers = await asyncio.gather(*(bed.ask(shared()) for _ in range(5)))
        assert Counter(answer.status for answer in answers) == {200: 3, 429: 2}


async def test_a_call_is_tried_elsewhere_and_a_failure_reaches_all():
    async with TestBed() as bed:
        bed.every(Script(cut_after=0), Script(first_delay_s=0.05))
        answers = await asyncio.gather(*(bed.ask(shared(stream=True)) for _ in range(3)))
        assert all(answer.events[-1] == "[DONE]" for answer in answers)
        bed.every(Script(cut_after=2))
        answers = await asyncio.gather(*(bed.ask(shared(stream=True)) for _ in range(3)))
        assert all(json.loads(answer.events[-1])["error"]["code"] == "engine_failed" for answer in answers)
        await until_on_loop(lambda: len(bed.sink.records) == 6)
        assert Counter(record.outcome for record in bed.sink.records) == {"ok": 3, "cut": 3}


async def test_a_call_that_failed_is_due_when_one_that_joins_it_later_is(monkeypatch):
    monkeypatch.setattr(shared_calls, "RENEW_AFTER_S", 0.2)
    async with TestBed(one_slot()) as bed:
        bed.every(Script(cut_after=0), HANGS, Script())
        relaxed = bed.send(shared(target_ttft=9, deadline=9))
        await until_on_loop(lambda: calls(bed))
        busy = bed.send(completion(stream=True))
        await until_on_loop(lambda: len(calls(bed)) == 2)
        other = bed.send(completion(target_ttft=5, deadline=5))
        await settled()
        tight = bed.send(shared(target_ttft=3, deadline=4))

        def due():
            found = map(bed.gateway.runtime.requests.get, bed.gateway.scheduler.queue().ids())
            return [each.request.targets.deadline_s for each in found if each is not None]

        await until_on_loop(lambda: due() == [pytest.approx(4.5, abs=0.5), 5])
        (again,) = [each for each in bed.gateway.runtime.requests.values() if each.sends and each.request.attempts]
        assert again.request.failed_on == ("e1",), "what is known of its failure stays"
        await busy.hang_up()
        assert [(await client.done()).status for client in (relaxed, tight, other)] == [200] * 3


async def test_one_whose_waiting_time_ends_at_an_engine_that_then_fails_does_not_wait_again():
    async with TestBed(one_slot()) as bed:
        bed.every(Script(first_delay_s=0.5, cut_after=1), HANGS, Script())
        patient, hasty = bed.send(shared(waiting_time=9)), bed.send(shared(waiting_time=0.3))
        await until_on_loop(lambda: calls(bed))
        busy = bed.send(completion(stream=True))
        told = await asyncio.wait_for(hasty.done(), 3)
        assert (told.status, told.error["code"]) == (504, "waiting_time_exceeded")
        await until_on_loop(lambda: len(calls(bed)) == 2)
        assert not patient.task.done()
        await busy.hang_up()
        assert (await patient.done()).status == 200


async def test_one_that_waits_longer_does_not_end_with_the_first_in_the_queue():
    """The call failed at once and waits with the first one's targets."""
    async with TestBed(one_slot()) as bed:
        bed.every(Script(cut_after=0), HANGS, Script())
        hasty = bed.send(shared(waiting_time=0.5))
        await until_on_loop(lambda: calls(bed))
        busy = bed.send(completion(stream=True))
        await until_on_loop(lambda: len(calls(bed)) == 2)
        patient = bed.send(shared(waiting_time=9))
        ended = await hasty.done()
        assert (ended.status, ended.error["code"]) == (504, "waiting_time_exceeded")
        await settled()
        assert not patient.task.done()
        await busy.hang_up()
        assert (await patient.done()).status == 200


async def test_one_that_waits_longer_does_not_end_when_the_engine_fails_too_late_for_the_first():
    async with TestBed(one_slot()) as bed:
        bed.every(Script(first_delay_s=0.6, cut_after=1), Script())
        hasty = bed.send(shared(waiting_time=0.3))
        await until_on_loop(lambda: calls(bed))
        patient = bed.send(shared(waiting_time=9))
        assert (await patient.done()).status == 200
        assert (await hasty.done()).error["code"] == "waiting_time_exceeded"


async def test_one_that_joined_at_the_engine_is_heard_of_when_it_fails_later(monkeypatch):
    """Long after it joined."""
    monkeypatch.setattr(shared_calls, "RENEW_AFTER_S", 0.1)
    async with TestBed(one_slot()) as bed:
        bed.every(Script(first_delay_s=0.5, cut_after=1), HANGS, Script())
        relaxed = bed.send(shared(target_ttft=9, deadline=9, waiting_time=9))
        await until_on_loop(lambda: calls(bed))
        tight = bed.send(shared(target_ttft=3, deadline=4, waiting_time=4))
        await settled()
        busy = bed.send(completion(stream=True))
        await until_on_loop(lambda: len(calls(bed)) == 2)
        waiting = bed.gateway.scheduler.queue
        await until_on_loop(lambda: [deadline(bed, name) for name in waiting().ids()] == [4])
        await busy.hang_up()
        assert [(await client.done()).status for client in (relaxed, tight)] == [200, 200]


def deadline(bed, name):
    found = bed.gateway.runtime.requests.get(name)
    return None if found is None else round(found.request.targets.deadline_s)


async def test_what_the_engine_refuses_is_told_to_all():
    async with TestBed() as bed:
        bed.every(Script(refuse_status=400))
        answers = await asyncio.gather(*(bed.ask(shared()) for _ in range(3)))
        assert [(answer.status, answer.error["message"]) for answer in answers] == [(400, "scripted refusal")] * 3


async def test_a_gateway_that_stops_ends_them_all_with_records():
    async with TestBed() as bed:
        bed.every(HANGS)
        clients = [bed.send(shared(stream=True)) for _ in range(3)]
        await until_on_loop(lambda: all(client.answer.body for client in clients))
        bed.gateway.runtime.give_up()
        for client in clients:
            assert json.loads((await client.done()).events[-1])["error"]["code"] == "shutting_down"
        await until_on_loop(lambda: len(bed.sink.records) == 3)


async def test_nobody_joins_a_call_whose_start_is_not_kept_or_that_many_share(monkeypatch):
    monkeypatch.setattr(shared_calls, "KEPT_BYTES", 40)
    monkeypatch.setattr(shared_calls, "MOST_SHARING", 2)
    async with TestBed() as bed:
        bed.every(Script(tokens=8, token_delay_s=0.03))
        clients = [bed.send(shared(stream=True)) for _ in range(3)]
        await until_on_loop(lambda: all(client.answer.body.count(b"data:") >= 4 for client in clients))
        assert len(calls(bed)) == 2
        late = bed.send(shared(stream=True))
        bodies = {(await client.done()).body for client in (*clients, late)}
        assert len(bodies) == 1
        assert len(calls(bed)) == 3


async def test_a_slow_reader_holds_the_engine_back_only_when_it_is_far_behind(monkeypatch):
    monkeypatch.setattr(shared_calls, "KEPT_BYTES", 100)
    monkeypatch.setattr(shared_calls, "BEHIND_BYTES", 400)
    async with TestBed() as bed:
        bed.every(Script(tokens=40))
        slow = bed.send(shared(stream=True))
        gate, writes = asyncio.Event(), slow._send

        async def held(message):
            await gate.wait()
            await writes(message)

        await until_on_loop(lambda: bed.gateway.shared_calls._of, every_s=0)
        (in_flight,) = bed.gateway.shared_calls._of
        in_flight.send = held
        fast = bed.send(shared(stream=True))
        await until_on_loop(lambda: fast.answer.body.count(b"data:") >= 5)
        await settled()
        ahead = fast.answer.body.count(b"data:")
        assert 5 <= ahead < 30
        gate.set()
        assert (await slow.done()).body == (await fast.done()).body
        assert len(slow.answer.events) == 41


async def test_the_metric_counts_those_that_got_anothers_answer():
    async with TestBed() as bed:
        bed.every(SLOW)
        await asyncio.gather(*(bed.ask(shared()) for _ in range(4)))
        found = {name: (labels, value) for name, _, labels, value in status.gauges(bed.gateway)}
        assert found["shared_requests_total"] == ({"tenant": "acme"}, 3)


async def test_followers_do_not_teach_lengths_or_count_as_work_of_the_fleet():
    async with TestBed() as bed:
        bed.every(SLOW)
        await asyncio.gather(*(bed.ask(shared()) for _ in range(5)))
        await until_on_loop(lambda: len(bed.sink.records) == 5)
        now = bed.gateway.clock()
        assert bed.gateway.ledger.finished.rates(now) == bed.gateway.arrivals.rates(now)
        assert bed.gateway.ledger.finished.rates(now)["demo"] == pytest.approx(0.1, abs=0.01)
