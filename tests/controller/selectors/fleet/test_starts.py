"""From the request to start to service, told apart by how an instance began and where its weights came from."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from controller.models import Action, Instance, LaunchTemplate
from controller.selectors.fleet.scaling import InstanceStart, cold_start_s, starts, times_by_way
from controller.selectors.fleet.weights import first_token_at
from controller.services.decisions import decision_record
from controller.services.fleet.launch_templates import shipped_templates_store
from controller.services.records.requests import records_write
from tests import factories

BEGAN = timezone.now() - timedelta(minutes=10)


def write(*records) -> None:
    connection.ensure_connection()
    records_write(connection=connection.connection, records=records)


def born(id: str, **fields) -> Instance:
    row = factories.instance(factories.served_model(), id=id, ready_at=BEGAN + timedelta(seconds=2), **fields)
    Instance.objects.filter(pk=id).update(created_at=BEGAN)
    row.refresh_from_db()
    return row


def ended(row: Instance, kind: str, after_s: float, outcome: dict, **params) -> Action:
    at = BEGAN + timedelta(seconds=after_s)
    decision = decision_record(
        actor=factories.ACTOR, kind="weights_load", subject_type="instance", subject=row.pk, reason="x", outcome=outcome
    )
    return Action.objects.create(
        kind=kind, instance=row, state="done", params=params, actor="scaler", actor_type="job", decision=decision,
        created_at=BEGAN + timedelta(seconds=60), ended_at=at,
    )  # fmt: skip


def served(instance: str, after_s: float, **fields) -> None:
    write(factories.record(instance=instance, arrived_at=(BEGAN + timedelta(seconds=after_s)).timestamp(), **fields))


@pytest.mark.django_db
def test_each_way_is_told_apart():
    born("a-cold")
    apart = born("b-apart", spec={"weights": "absent"})
    ended(apart, "weights_load", 65, {"source": "engine", "load_s": 0.5}, scale_out={"warm": False})
    warm = born("c-warm")
    ended(warm, "weights_load", 63, {"source": "disk", "load_s": 2.0}, scale_out={"warm": True})
    woken = born("d-woken")
    ended(woken, "wake", 61, {"source": "host", "load_s": 0.4}, scale_out={"woken": True})
    born("e-else", provisioner="static")
    served("a-cold", 3, ttft_s=0.5)
    served("c-warm", 64, ttft_s=0.5)

    found = {start.id: start for start in starts()}
    assert {id: start.way for id, start in found.items()} == {
        "a-cold": "process, cold",
        "b-apart": "process, cold, weights from another engine",
        "c-warm": "process, warm, weights from disk",
        "d-woken": "process, woken, weights from a host copy",
        "e-else": "static",
    }
    assert found["a-cold"].served_s == pytest.approx(3.5, abs=0.01)
    assert found["c-warm"].served_s == pytest.approx(4.5, abs=0.01), "from the scale-out that took it"
    assert (found["c-warm"].ready_s, found["d-woken"].ready_s) == (pytest.approx(3.0), pytest.approx(1.0))


@pytest.mark.django_db
def test_cold_starts_are_learned_by_template():
    """A small model's start says nothing about that of a large one."""
    shipped_templates_store()
    small, large = (LaunchTemplate.objects.get(name=name) for name in ("reference", "vllm"))
    for id, template, ready_s in (("a", small, 4), ("b", large, 90), ("c", large, 110), ("d", None, 2)):
        row = born(id, template=template)
        Instance.objects.filter(pk=row.pk).update(ready_at=BEGAN + timedelta(seconds=ready_s))
    told = {each.way: each.ready_s for each in times_by_way(starts())}
    assert told == {"process, cold": 2.0, "process reference, cold": 4.0, "process vllm, cold": 100.0}


@pytest.mark.django_db
def test_a_prefill_instance_serves_with_the_first_request_it_prefilled():
    born("p", role="prefill")
    served("d", 9, ttft_s=1.0, prefill_instance="p")
    served("d", 7, ttft_s=1.0)
    served("d", 8, ttft_s=1.0, prefill_instance="p")
    (start,) = starts()
    assert start.served_s == pytest.approx(9.0, abs=0.01)


@pytest.mark.django_db
def test_ready_is_the_engines_own_moment_and_never_after_the_first_token():
    """A worker's look ends a load later than the weights came: a token may lie in between."""
    warm = born("a-warm")
    told = {"source": "engine", "load_s": 0.5, "ready_s": 0.75}
    ended(warm, "weights_load", 62, told, scale_out={"warm": True})
    apart = born("b-apart", spec={"weights": "absent"})
    ended(apart, "weights_load", 62, told, scale_out={"warm": False})
    silent = born("c-silent")
    ended(silent, "weights_load", 62, {"source": "engine", "load_s": 0.5}, scale_out={"warm": True})
    born("d-cold")  # seen ready after 2 s
    for id in ("a-warm", "c-silent"):
        served(id, 61, ttft_s=0.25)
    served("d-cold", 1, ttft_s=0.5)
    found = {start.id: (start.ready_s, start.served_s) for start in starts()}
    assert found["a-warm"] == (pytest.approx(0.75), pytest.approx(1.25, abs=0.01))
    assert found["b-apart"] == (pytest.approx(60.75), None)
    assert found["c-silent"] == (pytest.approx(1.25, abs=0.01), pytest.approx(1.25, abs=0.01))
    assert found["d-cold"] == (pytest.approx(1.5, abs=0.01), pytest.approx(1.5, abs=0.01))


@pytest.mark.django_db
def test_a_launched_server_counts_from_the_command():
    row = born("a-seeded", provisioner="static")
    launch = {"decision": 1, "at": (BEGAN - timedelta(seconds=30)).isoformat(), "seed": "s"}
    Action.objects.create(
        kind="first_served", instance=row, params={"launch": launch}, actor="o", actor_type="person", created_at=BEGAN
    )
    served("a-seeded", 5, ttft_s=1.0)
    (start,) = starts()
    assert (start.way, start.cold) == ("static, seeded", False)
    assert (start.ready_s, start.served_s) == (pytest.approx(32.0), pytest.approx(36.0, abs=0.01))


def test_medians_by_way():
    rows = [InstanceStart(str(n), "process, warm", BEGAN, 1.0 + n, 2.0 + n, "disk", 0.5) for n in range(3)]
    rows.append(InstanceStart("late", "process, warm", BEGAN, None, None, "disk"))
    rows.append(InstanceStart("cold", "process", BEGAN, 8.0, None, cold=True))
    cold, warm = times_by_way(rows)
    assert (cold.way, cold.count, cold.served, cold.served_s, cold.ready_s) == ("process, cold", 1, 0, None, 8.0)
    assert (warm.way, warm.count, warm.served) == ("process, warm, weights from disk", 4, 3)
    assert (warm.served_s, warm.ready_s, warm.load_s) == (3.0, 2.0, 0.5)
    assert times_by_way([]) == []


@pytest.mark.django_db
def test_an_answer_in_one_piece_is_served_when_it_is_there_and_one_that_failed_is_not():
    row, other = born("a-cold"), born("b-cold")
    whole = {"streamed": False, "ttft_s": None, "e2e_s": 4.0}
    served("a-cold", 3, **whole, outcome="cancelled")
    served("a-cold", 5, **whole)
    served("b-cold", 6, **whole, outcome="failed")
    found = {start.id: start for start in starts()}
    assert (found["a-cold"].served_s, found["b-cold"].served_s) == (pytest.approx(9.0, abs=0.01), None)
    assert first_token_at(row, BEGAN) == pytest.approx(BEGAN + timedelta(seconds=9), abs=timedelta(seconds=0.01))
    assert first_token_at(other, BEGAN) is None


@pytest.mark.django_db
def test_the_first_token_counts_and_not_the_first_arrival():
    row, prefill = born("a-cold"), born("b-prefill", role="prefill")
    whole = {"streamed": False, "ttft_s": None}
    served("a-cold", 3, **whole, e2e_s=40.0)
    served("a-cold", 5, ttft_s=0.5)
    served("a-cold", 5.2, ttft_s=0.1)
    served("a-cold", 6, ttft_s=0.1)
    served("d", 3, **whole, e2e_s=40.0, prefill_instance="b-prefill")
    served("d", 9, ttft_s=1.0, prefill_instance="b-prefill")
    found = {start.id: start.served_s for start in starts()}
    assert found == {"a-cold": pytest.approx(5.3, abs=0.01), "b-prefill": pytest.approx(10.0, abs=0.01)}
    for each in (row, prefill):
        expected = BEGAN + timedelta(seconds=found[each.pk])
        assert first_token_at(each, BEGAN) == pytest.approx(expected, abs=timedelta(seconds=0.01))


@pytest.mark.django_db
def test_a_token_from_before_the_start_belongs_to_an_earlier_run():
    born("a-cold")
    served("a-cold", -20, ttft_s=0.5)
    served("a-cold", -5, ttft_s=7.0)
    (start,) = starts()
    assert start.served_s == pytest.approx(2.0, abs=0.01)


@pytest.mark.django_db
def test_the_time_of_a_start_is_the_median_of_the_last_five_of_its_template():
    shipped_templates_store()
    vllm, other = (LaunchTemplate.objects.get(name=name) for name in ("vllm", "reference"))
    model = factories.served_model()
    first = factories.instance(model, id="first", template=vllm)
    assert cold_start_s(first) is None, "none was seen ready"
    for number, (template, start_s) in enumerate([(vllm, 900), *((vllm, s) for s in (30, 50, 40, 60, 20)), (other, 2)]):
        row = factories.instance(model, id=f"i{number}", template=template)
        at = BEGAN.timestamp() + 60 * number
        steps = {"process": at + 5, "weights": at + 9, "ready": at + 5 + start_s}
        Instance.objects.filter(pk=row.pk).update(
            start_steps=steps, created_at=BEGAN + timedelta(minutes=number), ready_at=BEGAN + timedelta(days=1)
        )
    assert cold_start_s(Instance.objects.get(pk="i1")) == 40.0, "not what was seen first, nor when it was ready again"
    assert cold_start_s(Instance.objects.get(pk="i6")) == 2.0
    assert cold_start_s(factories.instance(model, id="plain")) is None
