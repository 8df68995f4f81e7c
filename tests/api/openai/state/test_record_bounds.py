"""Memory and disk for records have bounds: refusals are given up first, and every loss is told."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from api.openai.gateway import GatewayOptions
from api.openai.publisher import REFUSALS_S, Publisher
from api.openai.service import GatewayService
from api.openai.state import recorder as module
from api.openai.state.losses import OTHER, REFUSED, Loss, Losses, figures
from api.openai.state.recorder import Recorder, Unstorable, weight
from api.openai.state.spool import BLOCK, RecordBounds, Spool
from api.openai.state.standalone import FileStore
from api.openai.state.storage import Database
from api.openai.status import metrics
from controller.core.decisions import DecisionMessage
from controller.core.types import RequestRecord, record_as_dict
from controller.models import Decision
from tests import factories
from tests.api.openai.gateways import TestBed
from tests.api.openai.test_publisher import Audit, Board

ALL = 10_000


def served(count: int) -> list[RequestRecord]:
    return [factories.record() for _ in range(count)]


def refused(count: int, **fields: Any) -> list[RequestRecord]:
    return [factories.record(outcome="refused", attempts=0, attained=False, **fields) for _ in range(count)]


def bounds(**given: int) -> RecordBounds:
    return RecordBounds(
        **{"buffer_records": ALL, "buffer_bytes": 1 << 40, "spool_records": ALL, "spool_bytes": 1 << 40, **given}
    )


class Away:
    """A database that takes nothing until it is back."""

    def __init__(self) -> None:
        self.away = True
        self.ids: list[str] = []

    def write(self, records: Sequence[RequestRecord]) -> int:
        if self.away:
            raise ConnectionError("the database is unavailable")
        self.ids += [record.id for record in records]
        return len(records)


class NoDisk(Spool):
    def save(self, records: Sequence[RequestRecord]) -> list[Path]:
        raise OSError("no space left on device")


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.0)


def kept(recorder: Recorder) -> list[str]:
    return [record.id for buffer in recorder._buffers.values() for record in buffer]


@pytest.mark.parametrize("within", [{"buffer_records": 40}, {"buffer_bytes": 40 * weight(factories.record())}])
async def test_memory_for_records_is_bounded_and_refusals_go_first(tmp_path: Path, within: dict[str, int]) -> None:
    recorder = Recorder(Away().write, Spool(tmp_path, bounds(**within)))
    first, hammering, last = served(30), refused(2_000), served(20)
    for record in [*first, *hammering, *last]:
        recorder.add(record)
    assert recorder.waiting == 40
    assert kept(recorder) == [record.id for record in [*first, *last][10:]], "the oldest of those that are left"
    assert recorder.losses.total == {(REFUSED, "memory"): 2_000, (OTHER, "memory"): 10}


async def test_memory_stays_bounded_while_a_full_disk_is_tried_again(tmp_path: Path, at_once: None) -> None:
    recorder = Recorder(Away().write, NoDisk(tmp_path, bounds(buffer_records=5)))
    for record in served(5):
        recorder.add(record)
    flushing = asyncio.create_task(recorder.flush())
    for record in refused(50):
        await asyncio.sleep(0.002)
        recorder.add(record)
    assert recorder.waiting <= 10, "in the buffer, and in hand"
    flushing.cancel()
    await asyncio.wait([flushing])
    recorder._put_back()
    assert recorder.waiting == 5
    assert recorder.losses.total.keys() == {(REFUSED, "memory")}
    assert recorder.losses.total.total() >= 45


@pytest.mark.parametrize("within", [{"spool_records": 12}, {"spool_bytes": 12 * BLOCK}])
async def test_the_spool_is_bounded_and_refusals_go_first(
    tmp_path: Path, at_once: None, within: dict[str, int]
) -> None:
    database = Away()
    recorder = Recorder(database.write, Spool(tmp_path, bounds(**within)))
    others = served(8)
    for one in [*others[:4], *refused(20, stands_for=3), *others[4:]]:
        recorder.add(one)
        await recorder.flush()  # one file each
    assert recorder.spooled == len(recorder.spool.files()) == 12
    assert recorder.spool.held_bytes == 12 * BLOCK
    assert recorder.losses.total == {(REFUSED, "disk"): 16 * 3}
    database.away = False
    await recorder.flush()
    assert database.ids[:8] == [record.id for record in others], "others before refusals"
    assert (len(database.ids), recorder.spool.files(), recorder.spool.held_bytes) == (12, [], 0)


def test_without_refusals_the_oldest_go_and_a_refusal_displaces_nothing(tmp_path: Path) -> None:
    spool = Spool(tmp_path, bounds(spool_records=3))
    sent = served(5)
    for record in sent:
        spool.save([record])
    assert [spool.load(path)[0].id for path in spool.files()] == [record.id for record in sent[2:]]
    assert spool.save(refused(1)) == []
    assert Counter(loss.kind for loss in spool.lost) == {OTHER: 2, REFUSED: 1}


def test_the_next_process_counts_what_it_finds(tmp_path: Path) -> None:
    Spool(tmp_path).save([*served(4), *refused(2)])
    lines = b"".join(orjson.dumps(record_as_dict(record)) + b"\n" for record in served(3))
    (tmp_path / "00000000000000000001-7-000001.jsonl").write_bytes(lines)  # of an earlier version
    spool = Spool(tmp_path, bounds(spool_records=9))
    assert len(spool.files()) == 3
    assert 9 <= spool.held_records <= 10, "by the names, and by its size"
    spool.save(served(6))
    assert len(spool.load(spool.files()[-1])) == 6
    assert Counter(loss.kind for loss in spool.lost)[REFUSED] == 1, "the refusals went first"


def test_records_that_the_database_refuses_are_set_aside_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.openai.state.spool.MOST_SET_ASIDE", 2)

    def write(records: Sequence[RequestRecord]) -> int:
        raise Unstorable("invalid input syntax")

    async def flush() -> Recorder:
        recorder = Recorder(write, Spool(tmp_path))
        for record in served(3):
            recorder.add(record)
        await recorder.flush()
        return recorder

    recorder = asyncio.run(flush())
    assert len(list(tmp_path.glob("*.refused"))) == 2
    assert recorder.losses.total == {(OTHER, "disk"): 1}
    assert recorder.waiting == 0


async def test_a_weight_is_no_less_than_what_a_record_is_as_text() -> None:
    async with TestBed() as bed:
        await bed.ask({"model": "demo", "prompt": "a few words", "max_tokens": 8, "stream": True})
        (record,) = bed.sink.records
    assert record.decisions
    assert weight(record) >= len(orjson.dumps(record_as_dict(record)))


async def test_a_gateway_shows_how_many_are_lost_beyond_its_own_bounds(tmp_path: Path) -> None:
    options = GatewayOptions("g", records=bounds(buffer_records=4))
    service = GatewayService(options, FileStore(tmp_path / "none.json"), tmp_path, None)
    gateway = await service.start()
    try:
        for record in served(10):
            service._recorder.add(record)
        lost = re.findall(rb"(?m)^slackline_records_lost_total\{(.*)\} ([0-9.]+)$", metrics(gateway))
        assert [(b'full="memory"' in labels, float(count)) for labels, count in lost] == [(True, 6.0)]
    finally:
        await service.stop()


@pytest.mark.django_db
def test_the_decision_says_how_many_and_from_when(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django.db.close_old_connections", lambda: None)  # the test's own has its transaction
    losses = Losses()
    losses.add(Loss("disk", REFUSED, 30, factories.NOON, factories.NOON + 5))
    losses.add(Loss("memory", OTHER, 2, factories.NOON + 1, factories.NOON + 60))
    message = Database().records_lost("gateway-1", figures(losses.take()))
    assert message["sentence"] == (
        "gateway-1 discarded the records of 32 requests, 30 of them refused, that arrived within 60 s until "
        "2026-10-21 12:01:00 UTC: stored figures do not include them"
    )
    decision = Decision.objects.get(kind="records_lost")
    assert (decision.reason, decision.actor) == ("no_room_for_records", "gateway-1")


class LostAudit(Audit):
    def __init__(self) -> None:
        super().__init__()
        self.lost: list[Mapping[str, Any]] = []

    def records_lost(self, gateway: str, figures: Mapping[str, Any]) -> DecisionMessage:
        if self.away:
            raise ConnectionError("the database is unavailable")
        self.lost.append(figures)
        return DecisionMessage(id="d1", at=0.0, sentence="", figures_text="")


async def test_a_loss_becomes_one_decision_once_the_database_is_back(tmp_path: Path) -> None:
    recorder = Recorder(Away().write, Spool(tmp_path, bounds(buffer_records=1)))
    async with TestBed() as bed:
        audit, board = LostAudit(), Board()
        publisher = Publisher(bed.gateway, board, audit, recorder.losses)
        audit.away = True
        for record in [*refused(3, stands_for=10), *served(2)]:
            recorder.add(record)
        publisher._refusals_at -= REFUSALS_S
        await publisher.tick()
        recorder.add(factories.record(arrived_at=factories.NOON + 9))
        audit.away = False
        for _ in range(2):
            publisher._refusals_at -= REFUSALS_S
            await publisher.tick()
        (row,) = audit.lost
        assert (row["requests"], row["refused_requests"]) == (32, 30)
        assert [topic for topic, _ in board.sent if topic == "live.decisions"] == ["live.decisions"]
        publisher.close()
