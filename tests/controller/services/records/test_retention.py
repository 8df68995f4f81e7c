"""What the retention task forgets of actions and of the audit, and what it may not."""

from datetime import timedelta

import pytest
from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from controller.models import Action, Decision, Transfer
from controller.services.actors import SYSTEM, Actor
from controller.services.decisions import decision_record
from controller.services.records.retention import actions_retain, decisions_retain
from tests import factories

pytestmark = [pytest.mark.db, pytest.mark.django_db]

NOW = timezone.now()


def ago(days):
    return NOW - timedelta(days=days)


def decided(days, actor=SYSTEM, **fields):
    return decision_record(
        actor=actor, kind="k", subject_type="s", subject=f"{days} days", reason="r", at=ago(days), **fields
    )


def action(instance, days, *, state="done", kind="weights_load", **fields):
    at = ago(days)
    return Action.objects.create(
        kind=kind, instance=instance, state=state, actor="scaler", actor_type="job", created_at=at,
        ended_at=None if state in Action.OPEN else at, **fields,
    )  # fmt: skip


def test_old_actions_go_with_their_transfers_and_leave_their_decision():
    row = factories.instance()
    decision = decided(100)
    old = action(row, 100, decision=decision)
    Transfer.objects.create(
        action=old,
        source_kind="disk",
        target=row.pk,
        attempt=1,
        bytes=1,
        seconds=1.0,
        state="done",
        recorded_at=ago(100),
    )
    action(row, 91)
    newest = action(row, 1)
    assert actions_retain(days=90, now=NOW) == 2
    assert list(Action.objects.all()) == [newest]
    assert Transfer.objects.count() == 0
    assert Decision.objects.get() == decision
    assert actions_retain(days=90, now=NOW) == 0


def test_the_newest_of_each_kind_stays_while_its_instance_is_wanted():
    row, gone = factories.instance(), factories.instance(desired_state="stopped", observed_state="stopped")
    action(row, 250)
    sleep, load = action(row, 300, kind="sleep"), action(row, 200)
    action(gone, 200)
    assert actions_retain(days=90, now=NOW) == 2
    assert set(Action.objects.all()) == {sleep, load}


def test_what_is_open_stays_however_old():
    row = factories.instance(desired_state="stopped")
    action(row, 300, state="running")
    assert actions_retain(days=1, now=NOW) == 0
    with pytest.raises(ValueError, match="days"):
        actions_retain(days=0)


def test_decisions_of_jobs_go_and_those_of_people_stay():
    olga, scaler, gateway = Actor.person("olga"), Actor.job("scaler"), Actor.gateway("g1")
    for actor in (olga, scaler, gateway, SYSTEM):
        decided(500, actor)
        decided(399, actor)
    newest = action(factories.instance(), 399, decision=decided(401, scaler))
    assert decisions_retain(days=400, now=NOW) == 4
    newest.refresh_from_db()
    assert newest.decision is None
    assert list(Decision.objects.filter(at__lt=ago(400)).values_list("actor", flat=True)) == ["olga"]
    assert Decision.objects.filter(at__lt=ago(398), at__gte=ago(400)).count() == 4
    trimmed = Decision.objects.get(kind="audit_trimmed")
    assert (trimmed.actor, trimmed.inputs["days"], trimmed.outcome) == ("retention", 400, {"gone": 4})
    assert decisions_retain(days=400, now=NOW) == 0
    assert Decision.objects.filter(kind="audit_trimmed").count() == 1


def test_many_go_in_several_transactions(monkeypatch):
    monkeypatch.setattr("controller.services.records.retention.CHUNK", 2)
    for days in range(500, 505):
        decided(days)
    assert decisions_retain(days=400, now=NOW) == 5
    trimmed = Decision.objects.filter(kind="audit_trimmed").order_by("pk")
    assert [each.outcome["gone"] for each in trimmed] == [2, 2, 1], "each of the transaction in which they went"


def test_for_ever_is_for_ever_and_a_month_is_the_least():
    decided(5000)
    assert decisions_retain(days=0, now=NOW) == 0
    with pytest.raises(ValueError, match="at least 30"):
        decisions_retain(days=29)


@pytest.mark.parametrize(("days", "actor"), [(500, Actor.person("olga")), (29, SYSTEM)])
@pytest.mark.parametrize("statement", ["DELETE FROM decision", "UPDATE decision SET reason = 'x'"])
def test_even_the_retention_cannot_touch_the_recent_or_what_people_did(days, actor, statement):
    decided(days, actor)
    refused = pytest.raises(IntegrityError, match="append-only")
    with refused, transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL slackline.retention = 'on'")
        cursor.execute(statement)
    assert Decision.objects.get().reason == "r"


def test_without_the_retention_nothing_is_deleted_however_old():
    decided(5000)
    with pytest.raises(IntegrityError, match="append-only"), transaction.atomic():
        Decision.objects.all().delete()
    assert Decision.objects.count() == 1
