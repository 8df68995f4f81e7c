"""A gateway process whose host's clock jumps, and one that Redis has left: keys still expire, quotas still hold."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import requests
from django.utils import timezone

from controller.services.actors import SYSTEM
from controller.services.slo.api_keys import api_key_create
from controller.services.slo.tenants import tenant_update
from tests.api.openai.test_process import (  # noqa: F401  # two_engines is a fixture
    GatewayProcess,
    bearer,
    gateway_over,
    stopped,
    two_engines,
)
from tests.waiting import until
from tests.workers.engine.process import EngineProcess
from workers.supervisor.embedded import EmbeddedRedis

pytestmark = [pytest.mark.db, pytest.mark.django_db(transaction=True)]
# The gateway with a wall clock that is as far from the machine's as a file says.
STEPPED = """
import sys, time
from pathlib import Path
real, told = time.time, Path({file!r})
time.time = lambda: real() + float(told.read_text())
from api.openai import __main__ as gateway
gateway.main()
"""
HOUR_S = 3600.0
LIVES_S = 8.0
QUOTA = 6


class Clock:
    """Sets the host's clock: seconds ahead of the machine's own."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.step(0.0)

    def step(self, seconds: float) -> None:
        changed = self._file.with_suffix(".new")
        changed.write_text(str(seconds))
        changed.replace(self._file)


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path / "ahead")


@pytest.fixture
def gateway(
    tmp_path: Path,
    clock: Clock,
    two_engines: list[EngineProcess],  # noqa: F811
    transactional_db: None,
) -> Iterator[GatewayProcess]:
    process = gateway_over(tmp_path, two_engines, ("-c", STEPPED.format(file=str(tmp_path / "ahead"))))
    yield process
    process.stop()


def models(gateway: GatewayProcess, secret: str) -> int:
    return requests.get(gateway.url + "/v1/models", headers=bearer(secret), timeout=5).status_code


def health(gateway: GatewayProcess) -> dict[str, Any]:
    answer = requests.get(gateway.url + "/healthz", timeout=5)
    assert answer.status_code == 200  # it serves, whatever is away
    found: dict[str, Any] = answer.json()
    return found


def test_a_clock_that_steps_neither_ends_a_key_early_nor_revives_one(
    gateway: GatewayProcess, clock: Clock, redis_server: EmbeddedRedis
) -> None:
    ends_at = time.monotonic() + LIVES_S
    expires_at = timezone.now() + timedelta(seconds=LIVES_S)
    new = api_key_create(actor=SYSTEM, tenant=gateway.key.tenant, name="short", expires_at=expires_at)
    until(lambda: models(gateway, new.secret) == 200, LIVES_S - 2)
    clock.step(HOUR_S)
    while time.monotonic() < ends_at - 2:
        assert models(gateway, new.secret) == 200, "the host's clock ended it"
        time.sleep(0.3)
    clock.step(-HOUR_S)
    until(lambda: models(gateway, new.secret) == 401, LIVES_S + 5)
    assert time.monotonic() > ends_at - 1
    assert redis_server.pid is not None
    with stopped(redis_server.pid):
        until(lambda: health(gateway)["redis"] == "away")
        for seconds in (-24 * HOUR_S, 24 * HOUR_S, 0.0):
            clock.step(seconds)
            assert models(gateway, new.secret) == 401, seconds
            assert gateway.ask().status_code == 200, seconds


def test_quotas_hold_while_redis_is_away_and_the_gateway_says_so(
    gateway: GatewayProcess, redis_server: EmbeddedRedis
) -> None:
    """Open for what the quota allows, closed beyond; a quota that changes meanwhile still arrives."""
    tenant = gateway.key.tenant
    tenant_update(actor=SYSTEM, tenant_id=tenant.pk, version=tenant.version, changes={"rpm": QUOTA})
    until(lambda: gateway.ask().headers.get("x-ratelimit-limit-requests") == str(QUOTA), 15)
    assert health(gateway)["redis"] == "ok"
    assert redis_server.pid is not None
    with stopped(redis_server.pid):
        until(lambda: health(gateway)["redis"] == "away")
        page = requests.get(gateway.url + "/metrics", timeout=5).text
        assert "slackline_redis_away 1.0" in page
        answers = [gateway.ask() for _ in range(2 * QUOTA)]
        served = [answer for answer in answers if answer.status_code == 200]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(served) <= QUOTA + 1  # one may have been refilled
        assert len(refused) >= QUOTA - 1
        assert {answer.json()["error"]["code"] for answer in refused} == {"rate_limit_exceeded"}
        tenant.refresh_from_db()
        tenant_update(actor=SYSTEM, tenant_id=tenant.pk, version=tenant.version, changes={"rpm": 100 * QUOTA})
        until(lambda: gateway.ask().headers.get("x-ratelimit-limit-requests") == str(100 * QUOTA), 20)
        assert [gateway.ask().status_code for _ in range(2 * QUOTA)] == [200] * 2 * QUOTA
    until(lambda: health(gateway)["redis"] == "ok", 20)
    assert "Redis is unavailable: nothing is published, quotas" in (gateway.folder / "gateway.log").read_text()
