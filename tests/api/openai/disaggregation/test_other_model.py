"""Through the gateway: KV that no decode engine can read is computed by another prefill engine, once at each."""

from __future__ import annotations

import pytest

from controller.core import events as ev
from tests.api.openai.disaggregation.disaggregated import (
    STREAMED,
    fleet,
    kinds,
    left_outstanding,
    patience,
    reads,
    transfers,
)
from tests.api.openai.gateways import TestBed, completion


@pytest.mark.parametrize("asked", [STREAMED, completion()], ids=["streamed", "whole"])
@pytest.mark.parametrize("source", ["p", "q"])
async def test_kv_that_no_one_reads_is_prefilled_where_somebody_does(asked: bytes, source: str) -> None:
    async with TestBed(fleet(p="prefill", q="prefill", d="decode", e="decode")) as bed:
        for name in ("d", "e"):
            reads(bed, name, source)
        for _ in range(2):  # whoever is asked first: of two one begins at the other prefill engine
            assert (await bed.ask(asked)).status == 200
        assert len(bed.backend(source).calls) == 2
        seen = {(step["kind"], step["reason"]) for record in bed.sink.records for step in record.decisions}
        assert {("transfer", "other_model"), ("place", "other_model")} <= seen
        assert await left_outstanding(bed) == 0


async def test_one_decode_engine_that_reads_it_is_enough() -> None:
    async with TestBed(fleet(p="prefill", q="prefill", d="decode", e="decode")) as bed:
        reads(bed, "d")
        for _ in range(2):
            answer = await bed.ask(STREAMED)
            assert (answer.status, answer.headers["x-slackline-instance"]) == (200, "e")
        assert len(bed.backend("d").calls) == 2, "once for each prefill engine"
        assert len(bed.backend("p").calls) + len(bed.backend("q").calls) == 2, "nothing is computed twice"


async def test_with_one_pair_of_one_model_all_are_answered_and_nothing_is_computed_twice_in_vain() -> None:
    """More others than a request may be prefilled for other reasons, and each is asked once."""
    others = ("p0", "p1", "p2", "p3")
    async with TestBed(fleet(**dict.fromkeys((*others, "z"), "prefill"), d="decode")) as bed:
        reads(bed, "d", "z")
        for _ in range(20):
            assert (await bed.ask(STREAMED)).status == 200
        assert [len(bed.backend(name).calls) for name in others] == [1, 1, 1, 1]
        assert len(bed.backend("z").calls) == 20
        assert await left_outstanding(bed) == 0


async def test_one_that_was_started_again_is_asked_again() -> None:
    async with TestBed(fleet(p="prefill", z="prefill", d="decode")) as bed:
        reads(bed, "d", "z")
        for _ in range(4):
            await bed.ask(STREAMED)
        assert len(bed.backend("p").calls) == 1
        runtime = bed.gateway.runtime
        runtime.instance_down("p", "it was ended")
        runtime.push(ev.InstanceUp(bed.backend("p").spec))
        for _ in range(4):
            assert (await bed.ask(STREAMED)).status == 200
        assert len(bed.backend("p").calls) == 2


async def test_the_log_says_what_the_record_says(caplog: pytest.LogCaptureFixture) -> None:
    async with TestBed(fleet(p="prefill", d="decode", e="decode")) as bed:
        reads(bed, "d")
        reads(bed, "e", "p")
        for _ in range(2):  # whoever is asked first
            await bed.ask(STREAMED)
    (said,) = [line for line in caplog.messages if line.startswith("decode of")]
    assert said.endswith("another layout (other_model)")


async def test_where_no_two_engines_have_one_model_it_ends_when_each_was_asked() -> None:
    async with TestBed(fleet(p="prefill", q="prefill", d="decode")) as bed:
        patience(bed, incompatible_hold_s=0.05)
        reads(bed, "d")
        answer = await bed.ask(STREAMED)
        assert (answer.status, answer.error["code"]) == (503, "no_capacity")
        assert (len(bed.backend("p").calls), len(bed.backend("q").calls)) == (1, 1)
        assert kinds(bed).count(("place", "other_model")) == 2, "prefilled elsewhere, then given up"
        assert {each["reason"] for each in transfers(bed)} == {"other_model"}
        assert await left_outstanding(bed) == 0
