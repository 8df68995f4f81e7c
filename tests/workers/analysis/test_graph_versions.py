"""Pattern graphs made of recorded workflows: judged on later ones, published if better than even shares."""

from __future__ import annotations

import hashlib
import random
import time

import pytest
from django.utils import timezone

from controller.models import GraphVersion
from controller.predict.pattern_graphs import Call, GraphSet, kind_of, kind_of_tool, levels_of, times_of
from controller.selectors.records.graph_versions import published_graph_content, published_graphs
from controller.services.actors import Actor
from controller.services.records.learned_versions import CONTENTS_KEPT
from controller.services.slo.tenants import tenant_remove
from tests import factories
from workers.analysis import graph_versions as module
from workers.analysis.graph_versions import finished_workflows, train_tenants
from workers.tasks.graphs import train as task

pytestmark = pytest.mark.django_db


def stored(count, *, tenant="acme", seed=0, ago_s=3_000.0, seconds=(2.0, 3.0, 15.0), **fields):
    """Workflows of a plan, a search and an answer, half a second between them, give or take a tenth."""
    rng, rows = random.Random(seed), []
    for number in range(count):
        at = time.time() - ago_s + number
        for stage, mean in zip(("plan", "search", "write"), seconds, strict=True):
            took = mean * rng.uniform(0.9, 1.1)
            own = {"tenant": tenant, "workflow": f"w{seed}-{number}", "stage": stage, "e2e_s": took}
            rows.append(factories.record(arrived_at=at, **{**own, **fields}))
            at += took + 0.5
    factories.records_stored(*rows)


def test_recorded_workflows_give_a_version_that_beats_even_shares():
    stored(40)
    stored(10, tenant="small")  # too few
    (row,) = train_tenants()
    assert (row.tenant, row.version, row.refused) == ("acme", 1, "")
    assert (row.workflows, row.judged, row.matched) == (32, 8, 1.0)
    assert row.error < 0.05
    assert row.even_error > 0.15
    (published,) = published_graphs()
    content = published_graph_content("acme", 1)
    assert hashlib.sha256(content).hexdigest() == published.digest == row.digest
    graphs = GraphSet.from_bytes(content)
    match = graphs.match([Call(kind_of("demo", "plan"), 0.0, None, 100, 0)])
    shares = [each / sum(match.seconds) for each in match.seconds]
    assert shares == pytest.approx([2 / 21, 3.5 / 21, 15.5 / 21], abs=0.03)


def test_parents_that_clients_named_give_the_levels():
    """Two searches, one after the other, that both depend on the plan: times alone would make a chain of them."""
    now = timezone.now()
    rows = []
    for number, (name, parents) in enumerate([("p", None), ("s1", ["p"]), ("s2", ["key"]), ("w", ["s1", "s2"])]):
        own = {"id": name, "workflow": "w1", "stage": name, "e2e_s": 1.0, "step_key": "key" if name == "p" else ""}
        rows.append(factories.record(arrived_at=now.timestamp() - 900 + 2 * number, parents=parents, **own))
    factories.records_stored(*rows)
    (found,) = finished_workflows("acme", now)
    assert [call.parents for call in found.calls] == [None, (1,), (1,), (2, 3)]
    assert levels_of(found.calls) == [0, 1, 1, 2]


def test_a_reported_tool_step_is_a_node_with_its_own_time():
    now = timezone.now()
    at = now.timestamp() - 900
    tool = {"key": "t", "name": "search", "began": at + 2, "ended": at + 5, "parents": ["p"]}
    factories.records_stored(
        factories.record(id="p", arrived_at=at, workflow="w1", stage="plan", e2e_s=1.0),
        factories.record(
            id="w", arrived_at=at + 6, workflow="w1", stage="write", e2e_s=2.0, parents=["t"], tool_steps=[tool]
        ),
    )
    (found,) = finished_workflows("acme", now)
    assert [(call.kind, call.parents) for call in found.calls] == [
        (kind_of("demo", "plan"), None), (kind_of_tool("search"), (1,)), (kind_of("demo", "write"), (2,)),
    ]  # fmt: skip
    assert [round(level.run_s, 3) for level in times_of(found.calls, levels_of(found.calls))] == [1, 3, 2]


def test_a_parent_without_a_record_leaves_it_to_times():
    now = timezone.now()
    factories.records_stored(
        factories.record(arrived_at=now.timestamp() - 900, workflow="w1", e2e_s=1.0),
        factories.record(arrived_at=now.timestamp() - 890, workflow="w1", e2e_s=1.0, parents=["lost"]),
    )
    (found,) = finished_workflows("acme", now)
    assert [call.parents for call in found.calls] == [None, None]


def test_graphs_that_foretell_worse_than_even_shares_are_refused_and_never_in_force():
    stored(32, seconds=(2.0, 3.0, 15.0))
    stored(8, seed=1, ago_s=2_000, seconds=(7.0, 7.0, 7.0))  # what came later was another kind of work
    (row,) = train_tenants()
    assert "equal shares" in row.refused
    assert row.content is None
    assert not published_graphs()


def test_the_task_makes_nothing_before_enough_is_new(monkeypatch):
    stored(40)
    task()
    assert GraphVersion.objects.count() == 1
    stored(40, seed=1)
    task()
    assert GraphVersion.objects.count() == 1, "the last one is too recent"
    monkeypatch.setattr(module, "GAP_S", 0.0)
    task()
    assert GraphVersion.objects.count() == 1, "nothing has ended since"
    GraphVersion.objects.update(trained_at=module.timezone.now() - module.timedelta(seconds=3_000))
    task()
    assert [row.version for row in GraphVersion.objects.order_by("version")] == [1, 2]


def test_running_workflows_and_calls_that_failed_or_were_kept_are_left_out():
    stored(3, ago_s=20.0)
    stored(3, seed=1, outcome="failed")
    stored(3, seed=2, attempts=0)
    stored(2, seed=3)
    found = finished_workflows("acme", module.timezone.now())
    assert [len(each.calls) for each in found] == [3, 3]


def test_a_tenant_never_gets_the_graphs_of_another():
    stored(30)
    stored(30, tenant="other", seconds=(15.0, 3.0, 2.0))
    assert [row.tenant for row in train_tenants()] == ["acme", "other"]
    ours, theirs = (GraphSet.from_bytes(published_graph_content(name, 1)) for name in ("acme", "other"))
    call = [Call(kind_of("demo", "plan"), 0.0, None, 100, 0)]
    assert ours.match(call).seconds[0] == pytest.approx(2, rel=0.2)
    assert theirs.match(call).seconds[0] == pytest.approx(15, rel=0.2)


def test_the_graphs_of_old_versions_are_dropped(monkeypatch):
    stored(40)
    monkeypatch.setattr(module, "GAP_S", 0.0)
    for _ in range(CONTENTS_KEPT + 2):
        GraphVersion.objects.update(trained_at=module.timezone.now() - module.timedelta(hours=2))
        task()
    kept = GraphVersion.objects.filter(content__isnull=False).count()
    assert (GraphVersion.objects.count(), kept) == (CONTENTS_KEPT + 2, CONTENTS_KEPT)


def workflow_stored(name, spans, **fields):
    """A workflow whose calls ran for these seconds of an hour ago."""
    start = time.time() - 1_500.0
    rows = [
        factories.record(
            arrived_at=start + began, tenant="acme", workflow=name, stage=f"s{number}", e2e_s=ended - began, **fields
        )
        for number, (began, ended) in enumerate(spans)
    ]
    factories.records_stored(*rows)


BESIDE = [(0.0, 100.0), (0.1, 1.0), (2.0, 3.0), (4.0, 5.0)]  # a chain beside one long call


def test_a_chain_beside_a_longer_call_keeps_nobody_from_their_graphs():
    """None of the chain's levels has a time of its own; the workflow is among those that are judged."""
    stored(39)
    workflow_stored("beside", BESIDE)
    stored(40, tenant="zeta", seed=2)
    assert [(row.tenant, row.refused) for row in train_tenants()] == [("acme", ""), ("zeta", "")]


def test_a_tenant_whose_graphs_cannot_be_made_keeps_nobody_from_theirs(monkeypatch, caplog):
    stored(40)
    stored(40, tenant="zeta", seed=2)
    judged = module.judge
    monkeypatch.setattr(module, "judge", lambda tenant, *rest: 1 / 0 if tenant == "acme" else judged(tenant, *rest))
    assert [row.tenant for row in train_tenants()] == ["zeta"]
    assert "no pattern graphs of acme" in caplog.text


def test_a_workflow_of_very_many_calls_is_left_out():
    workflow_stored("long", [(float(each), each + 0.9) for each in range(module.MOST_EACH + 1)])
    workflow_stored("most", [(float(each), each + 0.9) for each in range(module.MOST_EACH)])
    (found,) = finished_workflows("acme", module.timezone.now())
    assert len(found.calls) == module.MOST_EACH


def test_the_graphs_of_a_tenant_go_with_it():
    tenant = factories.tenant(name="acme")
    stored(40)
    stored(40, tenant="zeta", seed=2)
    train_tenants()
    tenant_remove(actor=Actor.person("olga"), tenant_id=tenant.pk)
    assert [row.tenant for row in GraphVersion.objects.all()] == ["zeta"]
