"""No record lost, none doubled: with a database that is away, slow to acknowledge, or back again."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from api.openai.state import recorder as module
from api.openai.state.losses import OTHER
from api.openai.state.offloop import Busy
from api.openai.state.recorder import Recorder, Unstorable
from api.openai.state.spool import RecordBounds, Spool
from controller.core.types import RequestRecord, StoredRecord, WorkflowCancellation, record_as_dict


def record(name: str) -> RequestRecord:
    return RequestRecord(
        id=name,
        arrived_at=1.5,
        tenant="acme",
        slo_class="chat",
        model="demo",
        priority=None,
        instance="e1",
        outcome="ok",
        error_code="",
        http_status=200,
        streamed=True,
        judged_by="tokens",
        prompt_tokens=1,
        output_tokens=2,
        target_ttft_s=1.0,
        target_tpot_s=0.1,
        target_deadline_s=None,
        waiting_time_s=5.0,
        queue_s=0.0,
        ttft_s=0.1,
        tpot_s=0.05,
        e2e_s=0.2,
        ttft_met=True,
        tpot_met=True,
        deadline_met=True,
        attained=True,
        goodput_tokens=2,
        attempts=1,
        workflow="",
        stage="",
        decisions=[{"kind": "dispatch", "figures": {"a": 1.0}}],
        token_times=[0.1],
    )


class Database:
    """Ignores ids it has, as the real writer does. `away`: raises before storing; `deaf`: stores, then raises."""

    def __init__(self) -> None:
        self.stored: dict[str, StoredRecord] = {}
        self.batches: list[int] = []
        self.away = self.deaf = False
        self.gate: threading.Event | None = None

    def write(self, records: Sequence[StoredRecord]) -> int:
        if self.gate is not None:
            self.gate.wait(10)
        if self.away:
            raise ConnectionError("the database is unavailable")
        self.batches.append(len(records))
        for item in records:
            self.stored.setdefault(item.id, item)
        if self.deaf:
            raise ConnectionError("the acknowledgement was lost")
        return len(records)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed database is tried again with the next flush."""
    monkeypatch.setattr(module, "RETRY_S", 0.0)


def fill(recorder: Recorder, names: Sequence[str]) -> None:
    for name in names:
        recorder.add(record(name))


async def test_a_cancelled_workflow_waits_on_disk_like_a_record(tmp_path: Path, at_once: None) -> None:
    database, told = Database(), WorkflowCancellation("acme", "w/1", "tenant", 1.0, 61.0, 5.5)
    database.away = True
    recorder = Recorder(database.write, Spool(tmp_path))
    fill(recorder, ["a"])
    recorder.cancelled(told)
    await recorder.flush()
    assert (recorder.waiting, recorder.spooled) == (0, 1)
    database.away = False
    await recorder.flush()
    assert list(database.stored.values()) == [record("a"), told]
    assert recorder.spool.files() == []


async def test_a_cancelled_workflow_that_is_given_up_counts_as_one_lost(tmp_path: Path) -> None:
    recorder = Recorder(Database().write, Spool(tmp_path, RecordBounds(buffer_records=1)))
    for workflow in ("a", "b"):
        recorder.cancelled(WorkflowCancellation("acme", workflow, "tenant", 1.0, 61.0, 5.5))
    assert recorder.losses.total == {(OTHER, "memory"): 1}
    assert (recorder.losses.take()[0].first_at, recorder.waiting) == (5.5, 1)


async def test_batches_reach_the_database(tmp_path: Path) -> None:
    database = Database()
    recorder = Recorder(database.write, Spool(tmp_path))
    names = [f"r{i}" for i in range(2_300)]
    fill(recorder, names)
    await recorder.flush()
    assert list(database.stored) == names
    assert database.batches == [1000, 1000, 300]
    assert (recorder.waiting, recorder.written, recorder.spool.files()) == (0, 2300, [])


async def test_an_outage_is_spooled_and_replayed_in_order(tmp_path: Path, at_once: None) -> None:
    database = Database()
    recorder = Recorder(database.write, Spool(tmp_path))
    database.away = True
    for batch in (["a", "b"], ["c"]):
        fill(recorder, batch)
        await recorder.flush()
    assert len(recorder.spool.files()) == recorder.spooled == 2
    assert recorder.failing_since is not None
    database.away = False
    fill(recorder, ["d"])
    await recorder.flush()
    assert list(database.stored) == ["d", "a", "b", "c"]
    assert database.stored["a"] == record("a")
    assert (recorder.spool.files(), recorder.spooled, recorder.failing_since) == ([], 0, None)


async def test_a_lost_acknowledgement_doubles_nothing(tmp_path: Path, at_once: None) -> None:
    database = Database()
    recorder = Recorder(database.write, Spool(tmp_path))
    database.deaf = True
    fill(recorder, ["a", "b"])
    await recorder.flush()
    database.deaf = False
    await recorder.flush()
    assert list(database.stored) == ["a", "b"]
    assert recorder.spool.files() == []


async def test_a_hanging_database_holds_up_nothing(
    tmp_path: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITE_S", 0.05)
    database = Database()
    database.gate = threading.Event()
    recorder = Recorder(database.write, Spool(tmp_path))
    for name in ("a", "b"):
        fill(recorder, [name])
        await recorder.flush()
    assert (recorder.waiting, len(recorder.spool.files())) == (0, 2)
    database.gate.set()
    monkeypatch.setattr(module, "WRITE_S", 5.0)
    while not database.stored:
        await recorder.flush()
    await recorder.flush()
    assert sorted(database.stored) == ["a", "b"]
    assert recorder.spool.files() == []


async def test_the_next_gateway_over_the_same_folder_replays(tmp_path: Path) -> None:
    away, back = Database(), Database()
    away.away = True
    first = Recorder(away.write, Spool(tmp_path))
    fill(first, ["a", "b"])
    await first.close()
    second = Recorder(back.write, Spool(tmp_path))
    await second.flush()
    assert list(back.stored) == ["a", "b"]


async def test_a_record_the_database_refuses_is_set_aside(tmp_path: Path) -> None:
    database = Database()

    def write(records: Sequence[StoredRecord]) -> int:
        if any(item.id == "bad" for item in records):
            raise Unstorable("invalid input syntax")
        return database.write(records)

    recorder = Recorder(write, Spool(tmp_path))
    fill(recorder, ["a", "b", "bad", "c", "d"])
    await recorder.flush()
    assert list(database.stored) == ["a", "b", "c", "d"]
    assert recorder.spool.files() == []
    assert orjson.loads((tmp_path / "bad.refused").read_bytes())["id"] == "bad"


@pytest.mark.parametrize("error", [OSError("no space left on device"), TimeoutError(), Busy()])
async def test_a_refused_record_that_cannot_be_set_aside_takes_no_other_with_it(
    tmp_path: Path, at_once: None, error: Exception
) -> None:
    database = Database()

    def write(records: Sequence[StoredRecord]) -> int:
        if any(item.id == "bad" for item in records):
            raise Unstorable("invalid input syntax")
        return database.write(records)

    class FullDisk(Spool):
        full = True

        def save(self, records: Sequence[StoredRecord]) -> list[Path]:
            saved.append([item.id for item in records])
            if self.full:
                self.full = False
                raise error
            return super().save(records)

        def set_aside(self, record: StoredRecord) -> Path | None:
            if len(saved) < 2:
                raise error
            return super().set_aside(record)

    saved: list[list[str]] = []
    recorder = Recorder(write, FullDisk(tmp_path))
    fill(recorder, ["a", "b", "bad", "c", "d"])
    await recorder.flush()  # the record stays in memory, then in the spool, and is set aside from there
    assert saved == [["bad"], ["bad"]]
    assert sorted(database.stored) == ["a", "b", "c", "d"]
    assert (recorder.written, recorder.waiting) == (4, 0)
    assert recorder.spool.files() == []
    assert orjson.loads((tmp_path / "bad.refused").read_bytes())["id"] == "bad"


ENORMOUS = int(1.7e308)  # what `int` makes of a figure that an engine reported


@pytest.mark.parametrize("figure", [ENORMOUS, 10**5000, object()], ids=["309 digits", "5,000 digits", "no figure"])
@pytest.mark.parametrize("away", [False, True])
async def test_a_record_that_cannot_be_written_as_json_takes_no_other_with_it(
    tmp_path: Path, at_once: None, figure: int, away: bool
) -> None:
    """Found by attack: the rest of its batch, records of other tenants, was gone without a trace."""
    database = Database()

    def write(records: Sequence[StoredRecord]) -> int:
        if any(item.id == "bad" for item in records):
            raise Unstorable("out of range")
        return database.write(records)

    recorder = Recorder(write, Spool(tmp_path))
    fill(recorder, ["a", "b"])
    recorder.add(replace(record("bad"), prompt_tokens=figure))
    fill(recorder, ["c", "d"])
    database.away = away
    if away:
        recorder._retry_at = math.inf
    await recorder.flush()
    database.away = False
    recorder._retry_at = 0.0
    fill(recorder, ["e"])
    await recorder.flush()
    assert sorted(database.stored) == ["a", "b", "c", "d", "e"]
    assert (recorder.waiting, recorder.spool.files()) == (0, [])
    assert b"bad" in (tmp_path / "bad.refused").read_bytes()


async def test_a_defect_while_a_batch_is_written_keeps_the_batch(tmp_path: Path, at_once: None) -> None:
    database = Database()
    database.away = True

    class Defect(Spool):
        broken = True

        def save(self, records: Sequence[StoredRecord]) -> list[Path]:
            if self.broken:
                self.broken = False
                raise RuntimeError("a defect")
            return super().save(records)

    recorder = Recorder(database.write, Defect(tmp_path))
    fill(recorder, ["a", "b"])
    await recorder.flush()
    database.away = False
    recorder._retry_at = 0.0
    await recorder.flush()
    assert sorted(database.stored) == ["a", "b"]


async def test_a_full_disk_keeps_records_in_memory(
    tmp_path: Path, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk(Spool):
        full = True

        def save(self, records: Sequence[StoredRecord]) -> list[Path]:
            if self.full:
                self.full = False
                raise OSError("no space left on device")
            return super().save(records)

    database = Database()
    database.away = True
    recorder = Recorder(database.write, FullDisk(tmp_path))
    fill(recorder, ["a", "b"])
    await recorder.flush()
    assert (recorder.waiting, len(recorder.spool.files())) == (0, 1)
    database.away = False
    await recorder.flush()
    assert list(database.stored) == ["a", "b"]


class BrokenDisk(Spool):
    """`gate`: hangs at it instead of saying so."""

    gate: threading.Event | None = None

    def save(self, records: Sequence[StoredRecord]) -> list[Path]:
        if self.gate is not None:
            self.gate.wait(30)
        raise OSError("input/output error")


def lost(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "lost" in each.getMessage()]


@pytest.fixture
def closed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 0.4 s, of which no failure may wait for the next try."""
    monkeypatch.setattr(module, "CLOSE_S", 0.4)
    monkeypatch.setattr(module, "RETRY_S", 0.05)


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_close_without_database_and_disk_ends_and_says_how_much_is_lost(
    tmp_path: Path, closed_soon: None, caplog: pytest.LogCaptureFixture, hangs: bool
) -> None:
    database, disk, gate = Database(), BrokenDisk(tmp_path), threading.Event()
    database.away = True
    database.gate = disk.gate = gate if hangs else None
    recorder = Recorder(database.write, disk)
    fill(recorder, ["a", "b", "c"])
    async with asyncio.timeout(10):
        await recorder.close()
    gate.set()
    assert lost(caplog) == [f"3 records are lost: neither the database nor {tmp_path} took them within 0.4 s"]
    assert recorder.spool.files() == []


async def test_a_close_that_loses_nothing_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    database = Database()
    recorder = Recorder(database.write, Spool(tmp_path))
    fill(recorder, ["a"])
    await recorder.close()
    assert (list(database.stored), lost(caplog)) == (["a"], [])


@pytest.fixture
def patient_disk(monkeypatch: pytest.MonkeyPatch, closed_soon: None) -> None:
    """Only the database's half of a close ends soon: a busy machine's disk has all the time that it needs."""
    real = Recorder._save_rest

    async def save_rest(recorder: Recorder) -> None:
        monkeypatch.setattr(module, "CLOSE_S", 60.0)
        await real(recorder)

    monkeypatch.setattr(Recorder, "_save_rest", save_rest)


@pytest.mark.parametrize("under_way", [False, True])
async def test_a_close_with_a_hanging_database_leaves_everything_in_the_spool(
    tmp_path: Path, patient_disk: None, caplog: pytest.LogCaptureFixture, under_way: bool
) -> None:
    """Also what a flush that began before has in hand."""
    database, entered = Database(), threading.Event()
    database.gate = gate = threading.Event()

    def write(records: Sequence[StoredRecord]) -> int:
        entered.set()
        return database.write(records)

    recorder = Recorder(write, Spool(tmp_path))
    fill(recorder, ["a", "b"])
    if under_way:
        running = asyncio.create_task(recorder.run())
        recorder._full.set()
        assert await asyncio.to_thread(entered.wait, 10)
        running.cancel()
        await asyncio.wait([running])
        fill(recorder, ["c"])
    async with asyncio.timeout(60):
        await recorder.close()
    gate.set()
    saved = [item.id for path in recorder.spool.files() for item in recorder.spool.load(path)]
    assert saved == (["a", "b", "c"] if under_way else ["a", "b"])
    assert lost(caplog) == []


@pytest.mark.parametrize("error", [OSError("no space left on device"), KeyboardInterrupt()])
def test_a_file_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def full(descriptor: int) -> None:
        assert len(list(tmp_path.glob("*.part"))) == 1
        raise error

    spool = Spool(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(type(error)):
        spool.save([record("a")])
    assert list(tmp_path.iterdir()) == []


def test_what_a_process_that_died_left_half_written_is_removed_at_the_next_start(tmp_path: Path) -> None:
    [path] = Spool(tmp_path).save([record("a")])
    Spool(tmp_path).set_aside(record("bad"))
    (tmp_path / "crashed.part").write_bytes(b'{"id": "half')
    spool = Spool(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([path, tmp_path / "bad.refused"])
    assert spool.files() == [path]


def test_a_spool_file_is_whole_or_absent(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    [path] = spool.save([record("a")])
    (tmp_path / "crashed.part").write_bytes(b'{"id": "half')
    assert spool.files() == [path]
    assert orjson.loads(path.read_bytes()) == record_as_dict(record("a"))


def test_no_other_user_of_the_machine_reads_records(tmp_path: Path) -> None:
    folder = tmp_path / "spool" / "gw"
    for _ in range(2):
        Spool(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.chmod(0o755)  # as versions before made it


def test_an_unreadable_line_does_not_hold_up_the_rest(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    [path] = spool.save([record("a"), record("b")])
    path.write_bytes(path.read_bytes().replace(b'"id":"a"', b'"id:"a"'))
    assert [item.id for item in spool.load(path)] == ["b"]


def test_a_spool_file_of_the_version_before_is_replayed(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    [path] = spool.save([record("a")])
    raw = orjson.loads(path.read_bytes())
    del raw["prefill_instance"]
    path.write_bytes(orjson.dumps(raw) + b"\n")
    assert [(item.id, item.prefill_instance) for item in spool.load(path)] == [("a", "")]
