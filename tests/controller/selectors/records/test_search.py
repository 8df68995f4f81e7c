"""Search of requests and decisions: filters, order, and pages that lose and double nothing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.db import OperationalError
from django.utils import timezone

from controller.models import Instance
from controller.selectors import health
from controller.selectors.records import decisions, requests
from controller.services.actors import SYSTEM, Actor
from controller.services.decisions import decision_record
from tests import factories

pytestmark = pytest.mark.django_db


def pages(search, key, size: int = 2) -> list[str]:
    found, after = [], None
    while rows := list(search(after=after)[:size]):
        found += [row.pk for row in rows]
        after = (getattr(rows[-1], key), rows[-1].pk)
    return found


def test_pages_of_requests_hold_each_once_newest_first():
    factories.records_stored(
        *(factories.record(id=f"r{number}", arrived_at=factories.NOON + number // 3) for number in range(7))
    )

    assert pages(requests.search, "arrived_at") == ["r6", "r5", "r4", "r3", "r2", "r1", "r0"]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"id": "a"}, ["a"]),
        ({"tenant": "globex"}, ["b"]),
        ({"attained": False}, ["b"]),
        ({"slo_class": ""}, ["c"]),
        ({"since": datetime.fromtimestamp(factories.NOON + 1, UTC)}, ["c", "b"]),
        ({"until": datetime.fromtimestamp(factories.NOON + 1, UTC)}, ["a"]),
        ({"outcome": "expired", "instance": "engine-2"}, ["b"]),
        ({"instance": "prefill-1"}, ["c"]),
        ({"instance": "engine-1"}, ["c", "a"]),
    ],
)
def test_requests_are_found_by(asked, found):
    miss = {"outcome": "expired", "attained": False, "instance": "engine-2"}
    factories.records_stored(
        factories.record(id="a"),
        factories.record(id="b", tenant="globex", arrived_at=factories.NOON + 1, **miss),
        factories.record(id="c", slo_class="", prefill_instance="prefill-1", arrived_at=factories.NOON + 2),
    )

    assert [row.id for row in requests.search(**asked)] == found


def test_a_tenant_finds_its_own_request_alone():
    factories.records_stored(factories.record(id="a", tenant="globex"))

    assert requests.request_record(id="a", tenant="globex").id == "a"
    assert requests.request_record(id="a", tenant="acme") is None


def test_pages_of_decisions_hold_each_once_newest_first():
    at = timezone.now()
    made = [
        decision_record(
            actor=SYSTEM, kind="k", subject_type="s", subject="s", reason="r", at=at + timedelta(seconds=n // 3)
        )
        for n in range(7)
    ]

    assert pages(decisions.search, "at") == [decision.pk for decision in reversed(made)]


def test_decisions_are_found_by_kind_actor_subject_and_words():
    decision_record(actor=SYSTEM, kind="scale_out", subject_type="policy", subject="demo", reason="load_high")
    decision_record(actor=Actor.person("olga"), kind="drain", subject_type="instance", subject="e1", reason="asked")

    def subjects(**asked) -> list[str]:
        return [row.subject for row in decisions.search(**asked)]

    assert subjects(kind="drain") == subjects(actor="olga") == subjects(subject="e1") == subjects(text="ASK") == ["e1"]
    assert subjects(text="demo", kind="drain") == []
    assert decisions.kinds() == ["drain", "scale_out"]
    assert [row.kind for row in decisions.newest(1)] == ["drain"]


def test_the_fleet_is_what_is_wanted_or_still_there():
    model = factories.served_model()
    ready = factories.instance(model)
    factories.instance(model, observed_state=Instance.Observed.FAILED)
    stopping = factories.instance(model, desired_state=Instance.Desired.STOPPED)
    gone = factories.instance(model, desired_state=Instance.Desired.STOPPED, observed_state=Instance.Observed.STOPPED)

    live = set(Instance.objects.live().filter(model=model))
    assert {ready, stopping} <= live
    assert gone not in live


def test_health_says_what_is_missing(monkeypatch, django_assert_num_queries):
    with django_assert_num_queries(3):
        assert health.database_health().ok

    monkeypatch.setattr(health, "partitions", list)
    assert "no partition" in health.database_health().error

    def away() -> None:
        raise OperationalError("connection refused")

    monkeypatch.setattr(health, "partitions", away)
    assert health.database_health().reachable is False
