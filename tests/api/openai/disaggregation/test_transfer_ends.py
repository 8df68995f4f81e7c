"""When a transfer began and ended, told or not, through the gateway; time-outs; and that no request is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from controller.core import events as ev
from controller.core.kv_links import KvMoved
from controller.dispatch.lifecycle import State
from tests.api.openai.disaggregation.disaggregated import (
    STREAMED,
    fleet,
    kinds,
    patience,
    tells,
    transfers,
    transfers_so_far,
)
from tests.api.openai.gateways import TestBed, completion, settled
from tests.waiting import until_on_loop
from workers.backends.base import AnswerChunk, UpstreamCall
from workers.backends.fake import Script

MOVED = KvMoved(bytes=4096, layers=2, tokens=3, seconds=0.25, reserved=True, early_bytes=2048)


async def test_a_streams_transfer_ends_when_its_engine_says_so_and_not_with_its_first_token() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("d", Script(first_delay_s=0.2, moved=MOVED))
        client = bed.send(completion(stream=True))
        await until_on_loop(lambda: bed.backend("d").running == 1)
        await settled()
        (name,) = bed.gateway.runtime.requests
        assert bed.gateway.scheduler.migrator.state_of(name) is State.RELEASED
        assert (await client.done()).status == 200


async def test_a_whole_answers_transfer_ends_when_its_engine_says_so() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        tells(bed, "d").scripts = [Script(first_delay_s=0.2, moved=MOVED)]
        client = bed.send(completion())
        await until_on_loop(lambda: bed.backend("d").running == 1)
        await settled()
        (name,) = bed.gateway.runtime.requests
        assert bed.gateway.scheduler.migrator.state_of(name) is State.RELEASED
        assert transfers_so_far(bed) == ["kv_landed"], "long before the answer"
        assert (await client.done()).status == 200


async def hangs(call: UpstreamCall) -> AsyncIterator[AnswerChunk]:
    """No answer, not even headers."""
    await asyncio.Event().wait()
    yield AnswerChunk("accepted")


@pytest.mark.parametrize(("stream", "reason"), [(True, "placed_timeout"), (False, "moving_timeout")])
async def test_an_engine_that_does_not_answer_is_given_up_and_the_kv_used_elsewhere(stream: bool, reason: str) -> None:
    async with TestBed(fleet(p="prefill", d="decode", e="decode")) as bed:
        patience(bed, placed_timeout_s=0.05, moving_timeout_s=0.05)
        tells(bed, "d").generate = hangs
        tells(bed, "e").scripts = [Script(moved=MOVED)]
        answer = await bed.ask(completion(stream=stream))
        assert (answer.status, answer.headers["x-slackline-instance"]) == (200, "e")
        undone, done = transfers(bed)
        assert (undone["reason"], undone["outcome"], done["outcome"]) == (reason, "undone", "done")
        assert len(bed.backend("p").calls) == 1


async def test_a_whole_answer_that_fails_before_its_kv_landed_is_not_prefilled_again() -> None:
    async with TestBed(fleet(p="prefill", d="decode", e="decode")) as bed:
        tells(bed, "d").scripts = [Script(refuse_status=502)]
        tells(bed, "e").scripts = [Script(moved=MOVED)]
        assert (await bed.ask(completion())).status == 200
        assert len(bed.backend("p").calls) == 1


async def test_whole_answers_that_fail_one_after_the_other_close_their_link() -> None:
    """Of an engine that does not tell: the end of the transfer is only assumed, and says nothing good of the link."""
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        bed.backend("d", Script(cut_after=0))
        answer = await bed.ask(completion())
        assert answer.status == 503
        links = bed.gateway.scheduler.migrator.links
        assert not links.usable(("p", "d"), bed.gateway.runtime.clock())


# ---- nothing is lost ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 3])
async def test_a_placement_that_raises_loses_no_request(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        migrator = bed.gateway.scheduler.migrator
        choose, left = migrator.placement.choose, [times]

        def sometimes(*args: object) -> object:
            if left[0]:
                left[0] -= 1
                raise RuntimeError("a defect")
            return choose(*args)

        monkeypatch.setattr(type(migrator.placement), "choose", lambda self, *args: sometimes(*args))
        answers = [await client.done() for client in [bed.send(STREAMED) for _ in range(4)]]
        assert {answer.status for answer in answers} == {200}
        assert len(bed.sink.records) == 4


async def test_a_request_that_the_migrator_lost_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        migrator = bed.gateway.scheduler.migrator
        handle, left = migrator.handle, [2]  # with the others, and alone

        def breaks(events: Sequence[ev.Event], now: float) -> ev.Reply:
            done = [event for event in events if isinstance(event, ev.PrefillDone)]
            if done and left[0]:
                left[0] -= 1
                for event in done:
                    migrator.rollback.forget(event.request.id)
                raise RuntimeError("a defect")
            return handle(events, now)

        monkeypatch.setattr(migrator, "handle", breaks)
        answer = await bed.ask(STREAMED)
        assert answer.status == 200
        assert ("place", "migrator_failed") in kinds(bed)
        assert len(bed.backend("p").calls) == 2


async def test_roles_of_instances_that_left_are_forgotten() -> None:
    async with TestBed(fleet(p="prefill", d="decode")) as bed:
        for index in range(5):
            bed.gateway.configure(fleet(**{f"p{index}": "prefill", "d": "decode"}))
            await bed.gateway.monitor.settle(1)
            await asyncio.sleep(0)
        await settled()
        assert sorted(bed.gateway.scheduler.roles) == ["d", "p4"]
