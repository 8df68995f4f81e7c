"""The Overview's topic over days: gateways come and go, and only those that speak are kept. One state is made once."""

from __future__ import annotations

import orjson
import pytest

from console.consumers.overview import GONE_AFTER_S, OverviewConsumer, Shared
from tests.console.live.live_data import NOON, fleet
from workers import live


def told(consumer, *fleets):
    return [consumer.take({"data": each}) for each in fleets]


def kept(consumer):
    return sorted(consumer._fleets)


def test_a_gateway_that_has_fallen_silent_is_forgotten():
    consumer = OverviewConsumer()
    for number in range(1000):
        told(consumer, fleet(gateway=f"gateway-{number}", at=NOON + number))
        assert len(kept(consumer)) <= GONE_AFTER_S
    assert kept(consumer)[-1] == "gateway-999"


def test_the_newest_is_kept_however_old_it_is():
    consumer = OverviewConsumer()
    told(consumer, fleet(at=NOON))
    assert kept(consumer) == ["gateway-1"]
    assert consumer.age_s(NOON + 3600) == 3600


@pytest.fixture
def published(monkeypatch):
    """What Redis holds."""
    fleets = []

    async def read():
        return list(fleets)

    monkeypatch.setattr(live, "aread_fleet", read)
    return fleets


async def test_beside_one_that_speaks_what_hangs_is_soon_no_part_of_the_page(published):
    consumer = OverviewConsumer()
    told(consumer, fleet(gateway="hangs", at=NOON), fleet(gateway="speaks", at=NOON + 2.0))
    published[:] = [fleet(gateway="speaks", at=NOON + 2.0)]
    await consumer.refresh()
    assert kept(consumer) == ["hangs", "speaks"], "Redis may be a moment behind"
    published[:] = [fleet(gateway="speaks", at=NOON + 3.1)]
    await consumer.refresh()
    assert kept(consumer) == ["speaks"]


async def test_when_no_one_speaks_what_was_last_stays(published):
    consumer = OverviewConsumer()
    told(consumer, fleet(gateway="a", at=NOON), fleet(gateway="b", at=NOON + 0.2))
    await consumer.refresh()
    assert kept(consumer) == ["a", "b"]


def test_what_comes_late_or_twice_changes_nothing():
    consumer = OverviewConsumer()
    assert told(consumer, fleet(at=NOON), fleet(at=NOON), fleet(at=NOON - 1)) == [True, False, False]
    left_behind = fleet(gateway="gateway-0", at=NOON - GONE_AFTER_S)
    assert told(consumer, left_behind) == [False]
    assert kept(consumer) == ["gateway-1"]


def test_one_state_is_made_once_for_all():
    shared, made = Shared(kept=2), []

    def make():
        made.append(1)
        return {"queued": 7}

    frames = [orjson.dumps({"data": shared.get(("gateway-1", 1.0), make)}) for _ in range(100)]
    assert len(made) == 1
    assert set(frames) == {b'{"data":{"queued":7}}'}


def test_old_states_are_dropped():
    shared, made = Shared(kept=2), []
    for key in (1, 2, 3, 3, 1):
        shared.get(key, lambda key=key: made.append(key))
    assert made == [1, 2, 3, 1]
