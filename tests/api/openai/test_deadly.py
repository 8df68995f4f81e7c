"""A request that ends every engine that computes it, through a whole gateway: who is served, what its client hears."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from api.openai.state.refusal_groups import RefusalGroups
from controller.core.snapshot import TenantConfig
from controller.core.types import InstanceSpec, LatencyCoefficients
from tests.api.openai.gateways import TestBed, key_config, snapshot
from workers.backends.fake import Script

DEADLY = "a grammar that no engine survives"
SLOW = Script(first_delay_s=0.05, token_delay_s=0.001)
KEYS = (key_config("sk-acme"), key_config("sk-other", id=2, tenant="other"))
TENANTS = (TenantConfig(1, "acme", "chat"), TenantConfig(2, "other", "chat"))


def fleet(count: int) -> Any:
    """Engines of two speeds."""
    specs = tuple(
        InstanceSpec(
            f"e{n}",
            "demo",
            backend="fake",
            max_num_seqs=16,
            latency=LatencyCoefficients(0.02 + 0.02 * (n % 2), 1e-5, 0.0, 0.005, 0.0, 0.0),
        )
        for n in range(count)
    )
    return replace(snapshot(keys=KEYS, tenants=TENANTS), instances=specs)


def body(prompt: str = "a few words", **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": prompt, "max_tokens": 4, **fields}


def deadly_bed(count: int) -> TestBed:
    return TestBed(fleet(count))


async def arm(bed: TestBed) -> None:
    bed.every(SLOW)
    for name in bed.gateway.fleet.backends:
        bed.backend(name).deadly = DEADLY.encode()


def dead(bed: TestBed) -> list[str]:
    return sorted(name for name in bed.gateway.fleet.backends if bed.backend(name).dead)


@pytest.mark.parametrize("stream", [True, False])
async def test_it_ends_two_engines_and_the_requests_beside_it_are_served(stream: bool) -> None:
    async with deadly_bed(5) as bed:
        await arm(bed)
        beside = [bed.send(body(f"innocent {n}", stream=stream), key="sk-other") for n in range(20)]
        bad = await bed.ask(body(DEADLY, stream=stream), key="sk-acme")
        answers = [await each.done() for each in beside]

        assert (bad.status, bad.error["code"], bad.error["type"]) == (422, "ends_engines", "invalid_request_error")
        assert bad.error["message"] == (
            "This request was not served: 2 engines died while they computed it. "
            "The same request is refused for 600 s; change it before it is sent again."
        )
        assert bad.headers["x-should-retry"] == "false"
        assert len(dead(bed)) == 2
        assert [answer.status for answer in answers] == [200] * 20
        await asyncio.sleep(0)
        (record,) = [each for each in bed.sink.records if each.tenant == "acme"]
        assert (record.outcome, record.error_code, record.http_status) == ("failed", "ends_engines", 422)
        assert record.attempts == 2
        last = record.decisions[-1]
        assert (last["kind"], last["reason"]) == ("refuse", "ended_engines")
        assert sorted(last["figures"]["died"].split(", ")) == dead(bed)


async def test_the_same_request_is_refused_at_once_and_no_other() -> None:
    async with deadly_bed(5) as bed:
        await arm(bed)
        assert (await bed.ask(body(DEADLY), key="sk-acme")).status == 422
        again = await bed.ask(body(DEADLY), key="sk-acme")
        assert (again.status, again.error["code"]) == (422, "ends_engines")
        assert again.error["message"].startswith("This request ended engines when it was sent before, so it is refused")
        assert 590 < int(again.headers["retry-after"]) <= 600
        assert len(dead(bed)) == 2, "as its client's library repeats it, no more engines die"
        assert (await bed.ask(body("another"), key="sk-acme")).status == 200
        for name in bed.gateway.fleet.backends:
            bed.backend(name).deadly = b""
        assert (await bed.ask(body(DEADLY), key="sk-other")).status == 200, "of another tenant, who is not punished"
        record = [each for each in bed.sink.records if each.tenant == "acme"][1]
        assert (record.outcome, record.attempts, record.decisions[-1]["reason"]) == ("refused", 0, "quarantined")


async def test_refusals_in_quarantine_are_grouped_like_others() -> None:
    async with deadly_bed(4) as bed:
        await arm(bed)
        await bed.ask(body(DEADLY), key="sk-acme")
        for _ in range(40):
            await bed.ask(body(DEADLY), key="sk-acme")
        groups: RefusalGroups = bed.gateway.refused
        groups.close()
        refused = [each for each in bed.sink.records if each.outcome == "refused"]
        assert sum(each.stands_for for each in refused) == 40
        assert len(refused) < 40


async def test_an_engine_that_an_operator_takes_out_ends_no_request() -> None:
    async with deadly_bed(3) as bed:
        bed.every(Script(first_delay_s=0.3))
        client = bed.send(body(stream=True), key="sk-acme")
        await asyncio.sleep(0.05)
        (request,) = bed.gateway.runtime.requests.values()
        gone = request.instance
        left = tuple(spec for spec in bed.config.instances if spec.id != gone)
        bed.gateway.configure(replace(bed.config, instances=left, version=2))
        bed.gateway.fleet._drop(gone)
        assert (await client.done()).status == 200
        assert request.request.ended == ()
