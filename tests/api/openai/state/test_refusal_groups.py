"""A tenant that hammers over its quota: few records, and every request counted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from api.openai.state import refusal_groups
from api.openai.state.refusal_groups import MOST_WORKFLOWS, SINGLE, RefusalGroups
from controller.core.snapshot import TenantConfig
from controller.core.types import RequestRecord
from controller.slo.request_types import RequestType, type_of
from tests import factories
from tests.api.openai.gateways import ListSink, TestBed, key_config, snapshot

BODY = {"model": "demo", "prompt": "a few words", "max_tokens": 4}
HAMMERED = 600
GROUPS_WITHIN_S = refusal_groups.OPEN_S + 0.3


def tenants(*named: TenantConfig) -> dict[str, object]:
    keys = tuple(key_config(f"sk-{each.name}", id=each.id, tenant=each.name) for each in named)
    return {"tenants": named, "keys": keys}


def stood_for(records: Iterable[RequestRecord]) -> int:
    return sum(record.stands_for for record in records)


async def test_a_tenant_that_hammers_over_its_quota_writes_few_records() -> None:
    config = snapshot(**tenants(TenantConfig(1, "acme", "chat", rpm=1), TenantConfig(2, "other", "chat", rpm=1)))
    async with TestBed(config) as bed:
        answers = [await bed.ask(BODY, key="sk-acme") for _ in range(HAMMERED)]
        assert [answer.status for answer in answers].count(429) == HAMMERED - 1
        assert [(await bed.ask(BODY, key="sk-other")).status for _ in range(2)] == [200, 429]
        await asyncio.sleep(GROUPS_WITHIN_S)

        refused = [record for record in bed.sink.records if record.outcome == "refused"]
        mine = [record for record in refused if record.tenant == "acme"]
        seconds = {int(record.arrived_at) for record in mine}
        assert stood_for(mine) == HAMMERED - 1
        assert len(mine) <= (SINGLE + 1) * len(seconds), "not one for each refusal"
        assert [record.stands_for for record in refused if record.tenant == "other"] == [1]
        grouped = [record for record in mine if record.stands_for > 1]
        assert all(int(each.last_arrived_at or 0) == int(each.arrived_at) for each in grouped)
        known = {answer.headers["x-slackline-request-id"] for answer in answers}
        assert {record.id for record in mine} <= known, "each is one of the requests"


async def test_windows_figures_and_decisions_count_every_request() -> None:
    async with TestBed(snapshot(tenants=(TenantConfig(1, "acme", "chat", rpm=1),))) as bed:
        for _ in range(HAMMERED):
            await bed.ask(BODY)
        now = bed.gateway.clock()
        (row,) = bed.gateway.ledger.windows.view(now, {}, {})
        assert (row["finished"], row["attained"], row["refused"]) == (HAMMERED, 1, HAMMERED - 1)
        assert bed.gateway.ledger.refusals["acme", "chat", "rate_limit_exceeded"] == HAMMERED - 1
        page = (await bed.ask(b"", "/metrics", method="GET")).body.decode()
        counted = (
            'slackline_requests_total{code="rate_limit_exceeded",outcome="refused",slo_class="chat",tenant="acme"}'
        )
        assert f"{counted} {HAMMERED - 1:.1f}" in page
        await asyncio.sleep(GROUPS_WITHIN_S)
        refused = [record for record in bed.sink.records if record.outcome == "refused"]
        prompts = sum(record.all_prompt_tokens or record.prompt_tokens for record in refused)
        assert prompts == (HAMMERED - 1) * refused[0].prompt_tokens


async def test_refusals_for_other_reasons_stay_apart() -> None:
    sink = ListSink()
    groups = RefusalGroups(sink)
    for _ in range(SINGLE + 5):
        groups.add(factories.record(outcome="refused", attempts=0), "queue_full")
        groups.add(factories.record(outcome="refused", attempts=0), "no_instance")
    assert groups.waiting == 10
    assert len(sink.records) == 2 * SINGLE
    groups.close()
    assert [record.stands_for for record in sink.records[-2:]] == [5, 5]
    assert groups.waiting == 0


async def test_a_group_of_one_is_that_request_as_it_was() -> None:
    sink = ListSink()
    groups = RefusalGroups(sink)
    sent = [factories.record(outcome="refused", attempts=0) for _ in range(SINGLE + 1)]
    for record in sent:
        groups.add(record, "queue_full")
    groups.close()
    assert sink.records == sent


async def test_what_a_gateway_had_grouped_is_recorded_when_it_stops() -> None:
    sink = ListSink()
    groups = RefusalGroups(sink)
    for second in (0.0, 1.0, 59.9, 60.1):
        for _ in range(SINGLE + 2):
            groups.add(
                factories.record(outcome="refused", attempts=0, arrived_at=factories.NOON + second), "queue_full"
            )
    groups.close()
    grouped = [record for record in sink.records if record.stands_for > 1]
    assert [(record.stands_for, round(record.arrived_at - factories.NOON, 3)) for record in grouped] == [
        (2, 0.0), (2, 1.0), (2, 59.9), (2, 60.1),
    ]  # fmt: skip


async def test_types_stay_apart_and_each_workflow_is_told_of_its_own_refusals() -> None:
    """Goodput counts a workflow as missed for a request of it that was refused, and others by their type."""
    sink = ListSink()
    groups = RefusalGroups(sink)
    for number in range(SINGLE + 6):
        groups.add(factories.record(outcome="refused", attempts=0, workflow=f"w{number % 3}"), "queue_full")
    for _ in range(SINGLE + 4):
        groups.add(factories.record(outcome="refused", attempts=0), "queue_full")
        groups.add(factories.record(outcome="refused", attempts=0, target_deadline_s=5.0), "queue_full")
    groups.close()
    grouped = sink.records[3 * SINGLE :]
    told = sorted((each.workflow, each.target_deadline_s or 0.0, each.stands_for) for each in grouped)
    assert told == [("", 0.0, 4), ("", 5.0, 4), ("w0", 0.0, 2), ("w1", 0.0, 2), ("w2", 0.0, 2)]


async def test_a_flood_of_workflow_names_is_few_records() -> None:
    """What was refused beyond the bound was charged to the last workflow that had a record of its own."""
    sink = ListSink()
    groups = RefusalGroups(sink)
    for number in range(1_000):
        record = factories.record(outcome="refused", attempts=0, workflow=f"w{number}", target_deadline_s=5.0)
        groups.add(record, "queue_full")
    assert groups.waiting == 1_000 - SINGLE
    groups.close()
    assert len(sink.records) == SINGLE + MOST_WORKFLOWS + 1
    assert stood_for(sink.records) == 1_000
    *named, rest = sink.records
    assert [(each.workflow, each.stands_for) for each in named] == [(f"w{n}", 1) for n in range(len(named))]
    unnamed = 1_000 - len(named)
    assert (rest.workflow, rest.stands_for, type_of(rest)) == ("", unnamed, RequestType.COMPOUND)
    assert rest.decisions[-1]["figures"] == {"workflows": unnamed}


async def test_the_one_workflow_beyond_the_bound_is_named() -> None:
    sink = ListSink()
    groups = RefusalGroups(sink)
    for number in [*range(SINGLE + MOST_WORKFLOWS + 1), SINGLE + MOST_WORKFLOWS]:
        groups.add(factories.record(outcome="refused", attempts=0, workflow=f"w{number}"), "queue_full")
    groups.close()
    assert (sink.records[-1].workflow, sink.records[-1].stands_for) == (f"w{SINGLE + MOST_WORKFLOWS}", 2)
