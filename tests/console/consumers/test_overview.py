"""The Overview's topic over days: gateways come and go, and only those that speak are kept."""

from __future__ import annotations

from console.consumers.overview import GONE_AFTER_S, OverviewConsumer
from tests.console.live_data import NOON, fleet


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


def test_what_comes_late_or_twice_changes_nothing():
    consumer = OverviewConsumer()
    assert told(consumer, fleet(at=NOON), fleet(at=NOON), fleet(at=NOON - 1)) == [True, False, False]
    left_behind = fleet(gateway="gateway-0", at=NOON - GONE_AFTER_S)
    assert told(consumer, left_behind) == [False]
    assert kept(consumer) == ["gateway-1"]
