"""A live gateway that records its scheduler, and a replay of what it wrote."""

from __future__ import annotations

from pathlib import Path

from api.openai.gateway import Gateway, GatewayOptions
from api.openai.state.scheduler_log import SchedulerLog
from controller.core import events as ev
from controller.dispatch import build_scheduler
from controller.dispatch.event_log import Log
from controller.simulator.replay import Replay
from tests.api.openai.disaggregation.disaggregated import fleet
from tests.api.openai.gateways import TestBed, completion
from tests.waiting import until_on_loop
from workers.backends.fake import Script


def recording(bed: TestBed, path: Path) -> TestBed:
    session = None  # fake backends open no connection
    bed.gateway = Gateway(GatewayOptions("test", scheduler_log=path), session, bed.sink)  # type: ignore[arg-type]
    return bed


async def test_a_live_run_is_replayed_with_the_same_actions(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.jsonl"
    async with recording(TestBed(fleet(p="prefill", q="prefill", d="decode", e="decode", c="collocated")), path) as bed:
        bed.backend("d", Script(refuse_status=503), Script(cut_after=0), Script())
        bed.backend("p", Script(cut_after=0), Script())
        clients = [bed.send(completion(stream=bool(index % 3))) for index in range(30)]
        assert {(await client.done()).status for client in clients} == {200}
        bed.every(Script(hang_after=0))
        lost = [bed.send(completion(stream=True)) for _ in range(5)]
        await until_on_loop(lambda: sum(bed.backend(name).running for name in "pqdec") >= 3)
        bed.gateway.runtime.instance_down("p", "test")
        for client in lost:
            await client.hang_up()
        await until_on_loop(lambda: not bed.gateway.runtime.requests)
    replay = Replay(Log(path.read_text().splitlines()))
    assert list(replay.differences()) == []
    assert {"Send", "Place"} <= replay.kinds.keys()
    assert replay.kinds["Send"] > 35, "failures were tried again"


def test_a_log_ends_at_its_limit_and_the_scheduler_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.jsonl"
    scheduler = build_scheduler("slackline")
    log = SchedulerLog(path, scheduler, {}, max_bytes=300)
    for index in range(20):
        assert log.handle([ev.Woke()], float(index)).actions == []
    assert path.stat().st_size <= 300
    assert list(Replay(Log(path.read_text().splitlines())).differences()) == []
