"""What gateways publish, merged into one look."""

import pytest

from controller.scale.observation import Row, observe, outstanding

NOW = 1_700_000_000.0


def instance(id, utilisation=0.5, running=2, waiting=1):
    return {"id": id, "utilisation": utilisation, "running": running, "waiting": waiting}


def message(*instances, at=NOW - 0.5, **other):
    base = {"at": at, "period_s": 1.0, "instances": list(instances), "wait_over_slo": 0.0, "queued": 0}
    return {**base, "arrival_rate": 0.0, "service_rate": 0.0, **other}


READY = Row("a", "running", "ready", False)


def test_states_come_from_the_database():
    draining, stopped, lost = Row("c", "draining", "ready", False), Row("d", "stopped", "ready", True), "unreachable"
    rows = [READY, Row("b", "running", "pending", False), draining, stopped, Row("e", "running", lost, True)]
    look = observe(rows, [message(instance("a"))], NOW)
    assert [(m.id, m.state) for m in look.members] == [("a", "ready"), ("b", "starting"), ("c", "draining")]


def test_two_gateways_add_up():
    first = message(instance("a", 0.4, 2, 0), arrival_rate=3.0, service_rate=1.0, queued=2, wait_over_slo=0.3)
    second = message(instance("a", 0.7, 1, 1), arrival_rate=2.0, service_rate=3.0, queued=1, wait_over_slo=0.9)
    look = observe([READY], [first, second], NOW)
    assert (look.arrival_rate, look.queued, look.wait_over_slo, look.mean_utilisation) == (5.0, 3, 0.9, 0.7)
    assert look.processing_rate == pytest.approx(4.0 / 0.7)
    assert outstanding([first, second]) == {"a": 4}


def test_a_dead_gateway_beside_a_live_one_does_not_count():
    look = observe([READY], [message(instance("a", 0.9), at=NOW - 60, queued=50), message(instance("a", 0.2))], NOW)
    assert (look.queued, look.mean_utilisation, look.stale) == (0, 0.2, False)


def test_old_messages_alone_are_stale_with_their_age():
    look = observe([READY], [message(at=NOW - 60)], NOW)
    assert look.stale
    assert look.age_s == pytest.approx(60)


def test_no_message_at_all_is_stale():
    assert observe([READY], [], NOW).stale
