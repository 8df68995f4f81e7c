from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from api.openai.state.snapshot import SnapshotFile, SnapshotSource
from controller.core.snapshot import GatewaySnapshot
from controller.core.types import InstanceSpec, LatencyCoefficients, Role
from tests.api.openai.gateways import snapshot


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
    assert (second.version, second.origin, second.age_s()) == (7, "file", None)
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
    file.save(snapshot())
    assert file.path.stat().st_mode & 0o077 == 0
    assert file.load() == snapshot()
