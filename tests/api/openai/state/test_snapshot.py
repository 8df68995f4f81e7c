from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from api.openai.state.snapshot import SnapshotFile, SnapshotSource
from controller.core.snapshot import GatewaySnapshot
from controller.core.types import InstanceSpec, LatencyCoefficients, Role
from tests.api.openai.gateways import TestBed, completion, key_config, snapshot


class Store:
    def __init__(self, current: GatewaySnapshot) -> None:
        self.current = current
        self.away = False
        self.reads = 0

    def version(self) -> int:
        if self.away:
            raise ConnectionError("away")
        return self.current.version

    def snapshot(self) -> GatewaySnapshot:
        self.reads += 1
        return self.current


def source(store: Store, path: Path) -> tuple[SnapshotSource, list[GatewaySnapshot]]:
    applied: list[GatewaySnapshot] = []
    return SnapshotSource(store, SnapshotFile(path), applied.append), applied


async def test_a_change_is_read_once_and_applied(tmp_path: Path) -> None:
    store = Store(snapshot())
    config, applied = source(store, tmp_path / "s.json")
    await config.start()
    assert await config.poll()
    store.current = replace(snapshot(), version=2, keys=())
    assert await config.poll()
    assert [(item.version, len(item.keys)) for item in applied] == [(1, 1), (2, 0)]
    assert store.reads == 2


async def test_a_gateway_starts_from_disk_while_the_database_is_away(tmp_path: Path) -> None:
    latency = LatencyCoefficients(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    spec = InstanceSpec("e1", "demo", role=Role.PREFILL, latency=latency)
    first, _ = source(Store(snapshot(instances=()).__class__(version=7, instances=(spec,))), tmp_path / "s.json")
    await first.start()
    away = Store(snapshot())
    away.away = True
    second, applied = source(away, tmp_path / "s.json")
    await second.start()
    assert (second.version, second.origin) == (7, "file")
    age_s = second.age_s()
    assert age_s is not None
    assert age_s < 5
    assert applied[0].instances == (spec,)
    away.away = False
    assert await second.poll()
    assert second.origin == "database"


async def test_an_outage_keeps_the_last_configuration(tmp_path: Path) -> None:
    store = Store(snapshot())
    config, applied = source(store, tmp_path / "s.json")
    await config.start()
    store.away = True
    assert not await config.poll()
    assert (len(applied), config.version) == (1, 1)


async def test_without_database_and_file_nothing_is_applied(tmp_path: Path) -> None:
    store = Store(snapshot())
    store.away = True
    config, applied = source(store, tmp_path / "s.json")
    await config.start()
    assert (applied, config.origin) == ([], "none")


def test_an_unreadable_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text('{"version": 1, "tenants": [{"nonsense": 1}]}')
    assert SnapshotFile(path).load() is None


def test_the_file_is_only_ours_to_read(tmp_path: Path) -> None:
    file = SnapshotFile(tmp_path / "s.json")
    file.save(snapshot(), 7.0)
    assert file.path.stat().st_mode & 0o077 == 0
    assert file.load() == (snapshot(), 7.0)


def away() -> Store:
    store = Store(snapshot())
    store.away = True
    return store


HOUR_S = 3600.0
AGES = {
    "fresh": (0.5 * HOUR_S, 200),
    "too old": (1.5 * HOUR_S, 503),
    "clocks differ a little": (-30.0, 200),
    "from the future": (-HOUR_S, 503),
}


@pytest.mark.parametrize(("age_s", "status"), AGES.values(), ids=AGES.keys())
async def test_a_gateway_that_starts_without_database_accepts_keys_of_a_young_file_alone(
    tmp_path: Path, age_s: float, status: int
) -> None:
    file = SnapshotFile(tmp_path / "s.json")
    file.save(snapshot(), time.time() - age_s)
    store = away()
    async with TestBed() as bed:
        bed.gateway.options = replace(bed.gateway.options, config_max_age_s=HOUR_S)
        config = SnapshotSource(store, file, bed.gateway.configure)
        bed.gateway.config_age_s = config.age_s
        await config.start()
        answer = await bed.ask(completion())
        healthz = await bed.ask(b"", "/healthz", method="GET")
        assert (answer.status, healthz.status) == (status, status)
        if status == 503:
            assert answer.error["code"] == "configuration_stale"
            assert answer.headers["retry-after"]
        store.away = False
        assert await config.poll()
        assert (await bed.ask(completion())).status == 200


def test_a_file_of_an_older_release_has_no_known_age(tmp_path: Path) -> None:
    file = SnapshotFile(tmp_path / "s.json")
    file.save(snapshot(), time.time())
    raw = orjson.loads(file.path.read_bytes())
    del raw["confirmed_at"]
    file.path.write_bytes(orjson.dumps(raw))
    assert file.load() == (snapshot(), 0.0)


async def test_a_gateway_that_is_cut_off_from_the_database_stops_to_accept_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(snapshot())
    async with TestBed() as bed:
        bed.gateway.options = replace(bed.gateway.options, config_max_age_s=HOUR_S)
        config = SnapshotSource(store, SnapshotFile(tmp_path / "s.json"), bed.gateway.configure)
        bed.gateway.config_age_s = config.age_s
        await config.start()
        store.away, store.current = True, snapshot(keys=())  # the key is revoked, and the gateway cannot hear of it
        assert not await config.poll()
        assert (await bed.ask(completion())).status == 200
        later = time.monotonic() + HOUR_S + 1
        with monkeypatch.context() as patch:
            patch.setattr("api.openai.state.snapshot.time.monotonic", lambda: later)
            assert (await bed.ask(completion())).error["code"] == "configuration_stale"


async def test_the_file_is_stamped_while_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SnapshotFile(tmp_path / "s.json")
    config, _ = source(Store(snapshot()), file.path)
    await config.start()
    found = file.load()
    assert found is not None
    await config.poll()
    assert file.load() == found  # not at every poll
    wall, monotonic = time.time() + 61, time.monotonic() + 61
    with monkeypatch.context() as patch:
        patch.setattr("api.openai.state.snapshot.time.time", lambda: wall)
        patch.setattr("api.openai.state.snapshot.time.monotonic", lambda: monotonic)
        await config.poll()
    assert file.load() == (snapshot(), wall)


async def test_an_expired_key_stays_expired_when_the_host_s_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    expires_at = time.time() + 100
    async with TestBed(snapshot(keys=(key_config(expires_at=expires_at),))) as bed:
        assert (await bed.ask(completion())).status == 200
        now = time.monotonic()
        bed.gateway.shared.heard(expires_at + 1, now, now)
        bed.gateway.tell_clock()
        with monkeypatch.context() as patch:
            patch.setattr("time.time", lambda: expires_at - HOUR_S)
            answer = await bed.ask(completion())
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
