"""An edit before it is saved: re-judged in the database as one by one, simulated as edited; history and undo."""

from __future__ import annotations

import pytest
from django.utils import timezone

from console.views.configuration.previews import compared
from controller.core.snapshot import LevelBounds
from controller.core.types import Outcome, Targets
from controller.models import Decision, Experiment, PriorityMapping, RequestRecord
from controller.selectors.experiments import previews, traffic
from controller.selectors.experiments.edits import ClassEdit, MappingEdit, Owners, edit_as_json, edit_of_json
from controller.services.experiments.previews import EDITED, RECORDED
from controller.services.slo.priority_mappings import priority_mapping_update
from controller.services.slo.slo_classes import slo_class_update
from controller.slo.attainment import judge
from tests import experiment_data as data
from tests import factories
from workers.experiments import runner as worker

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("unsent_experiments")]

TIGHT = ClassEdit("interactive", Owners(), 0.15, 0.06, None, 5.0)


def typed(row, **changes):
    names = ("title", "ttft_s", "tpot_s", "waiting_time_s", "value", "version")
    return {**{name: getattr(row, name) for name in names}, "target": row.target * 100, "deadline_s": "", **changes}


def slo(reason, **figures):
    return [{"kind": "slo", "reason": reason, "figures": figures}, {"kind": "dispatch", "reason": "fits_budget"}]


def mixed_traffic(count=60):
    """Streamed and not, served and not, of a class, of a default, of explicit targets, of two tenants."""
    data.traffic(
        count,
        ttft_s=lambda n: None if n % 7 == 0 else 0.05 * (n % 5 + 1),
        tpot_s=lambda n: 0.03 + 0.01 * (n % 6),
        e2e_s=lambda n: None if n % 11 == 0 else 0.4 + 0.3 * (n % 7),
        judged_by=lambda n: "e2e" if n % 7 == 0 else "tokens",
        outcome=lambda n: "refused" if n % 11 == 0 else "cancelled" if n % 13 == 0 else "ok",
        attained=lambda n: n % 11 != 0 and n % 3 != 0,
        output_tokens=lambda n: 1 + n % 20,
        queue_s=lambda n: 0.2 * (n % 4),
        tenant=lambda n: "acme" if n % 2 else "demo",
        slo_class=lambda n: "batch" if n % 17 == 0 else "interactive",
        decisions=lambda n: slo("explicit" if n % 5 == 0 else "class" if n % 2 else "tenant_default"),
    )


def one_by_one(edit, decide):
    """The same count as the database's, by the judge that gateways use."""
    would = 0
    for row in edit.rows(RequestRecord.objects.all()).exclude(outcome="cancelled"):
        targets = decide(row)
        if row.queue_s is not None and row.queue_s > targets.waiting_time_s:
            continue
        outlook = judge(
            targets, Outcome(row.outcome), ttft_s=row.ttft_s, tpot_s=row.tpot_s, e2e_s=row.e2e_s,
            prompt_tokens=row.prompt_tokens, output_tokens=row.output_tokens,
            token_times=None if row.judged_by == "e2e" else (),
        )  # fmt: skip
        would += outlook.attained
    return would


@pytest.mark.parametrize("deadline", [None, 1.0])
@pytest.mark.parametrize("waiting", [5.0, 0.3])
def test_the_database_judges_a_class_as_the_gateway_would(deadline, waiting):
    mixed_traffic()
    edit = ClassEdit("interactive", Owners(), 0.15, 0.06, deadline, waiting)
    found = previews.last_hour(edit, timezone.now())
    assert found.total["would"] == one_by_one(edit, lambda row: Targets(0.15, 0.06, deadline, waiting)) > 0
    rows = edit.rows(RequestRecord.objects.all()).exclude(outcome="cancelled")
    assert found.total["requests"] == rows.count() < 60
    assert found.total["was"] == rows.filter(attained=True).count()
    assert found.total["was"] + found.total["won"] - found.total["lost"] == found.total["would"]
    assert {row["tenant"] for row in found.rows} == {"acme", "demo"}


def test_refusals_recorded_as_one_are_judged_as_all_of_them():
    group = {"stands_for": 50, "last_arrived_at": factories.NOON + 0.5, "all_prompt_tokens": 500}
    refused = {"outcome": "refused", "attained": False, "ttft_met": False, "tpot_met": False, "output_tokens": 0}
    decided = {"decisions": slo("class"), "slo_class": "interactive"}
    factories.records_stored(factories.record(**decided), factories.record(**refused, **group, **decided))
    (row,) = previews.judged(TIGHT, RequestRecord.objects.all())
    assert (row["requests"], row["was"]) == (51, 1)


def test_a_tenants_own_class_takes_its_requests_out_of_the_common_ones():
    data.traffic(10, tenant=lambda n: "acme" if n < 4 else "demo")
    common, acme = factories.slo_class(name="interactive"), factories.tenant(name="acme")
    own = factories.slo_class(name="interactive", tenant=acme)
    counts = {}
    for row in (common, own):
        edit = ClassEdit("interactive", previews.class_owners(row), 1.0, 0.1, None, 5.0)
        counts[row.pk] = previews.last_hour(edit, timezone.now()).total["requests"]
        assert edit_of_json(edit_as_json(edit)) == edit
    assert counts == {common.pk: 6, own.pk: 4}


def test_the_database_and_a_replay_give_a_mapping_the_same_targets():
    levels = (LevelBounds(0.5, 0.1, 0.4, 0.6, 0.08, 0.12), LevelBounds(2.0, 0.2, 1.5, 2.5, 0.15, 0.25))
    edit = MappingEdit(Owners(), levels)
    data.traffic(
        40,
        slo_class=lambda n: f"priority-{n % 3}",
        priority=lambda n: n % 3,
        target_tpot_s=lambda n: 0.05 + 0.01 * n,
        tpot_s=lambda n: 0.01 * n,
        ttft_s=lambda n: 0.06 * n,
        decisions=lambda n: (
            slo("priority", history="no_history", reference_ttft_s=None, queue_correction_s=0.0)
            if n % 4 == 0
            else slo("priority", history="history", reference_ttft_s=0.07 * n, queue_correction_s=0.1)
        ),
    )
    now = timezone.now()
    window = traffic.RecordedWindow(now - previews.WINDOW, now, "demo")
    replayed = {round(each.at, 3): edit.targets(each) for each in traffic.arrivals(window, sources=True)}
    ttft, tpot = edit.expressions()
    rows = edit.rows(RequestRecord.objects.all()).annotate(new_ttft=ttft, new_tpot=tpot).order_by("arrived_at")
    first = rows[0].arrived_at
    for row in rows:
        targets = replayed[round((row.arrived_at - first).total_seconds(), 3)]
        assert (row.new_ttft, row.new_tpot) == pytest.approx((targets.ttft_s, targets.tpot_s))
    assert len({targets.ttft_s for targets in replayed.values()}) > 5
    found = previews.last_hour(edit, now)
    assert found.total["requests"] == 40
    assert edit_of_json(edit_as_json(edit)) == edit


def test_the_page_re_judges_while_one_types_and_says_what_is_wrong(operator):
    row = factories.slo_class(name="interactive")
    data.traffic(20, ttft_s=lambda n: 0.1 * (n + 1), attained=lambda n: n < 10, tpot_s=0.05)
    page = operator.get(f"/classes/{row.pk}/").content.decode()
    assert f'data-preview-at="/classes/{row.pk}/preview/"' in page
    said = operator.post(f"/classes/{row.pk}/preview/", typed(row, ttft_s="0.5")).json()
    assert said["errors"] == {}
    assert "of the 20 requests" in said["html"]
    assert "<strong>25 %</strong> of the" in said["html"]
    assert "<strong>50 %</strong> before" in said["html"]
    wrong = operator.post(f"/classes/{row.pk}/preview/", typed(row, ttft_s="0", deadline_s="-1")).json()
    assert set(wrong["errors"]) == {"ttft_s", "deadline_s"}
    row.refresh_from_db()
    assert row.ttft_s == 1.0, "nothing is saved"
    assert not Decision.objects.filter(subject="interactive").exists()


def test_an_edit_is_simulated_beside_what_was_recorded_of_the_same_requests(operator):
    """Ten thousand are measured by `make bench-console`."""
    data.fleet()
    row = factories.slo_class(name="interactive")
    data.traffic(
        300, every_s=0.1, slo_class=lambda n: "interactive" if n % 2 else "batch", attained=lambda n: n % 4 == 1,
        outcome=lambda n: "cancelled" if n == 7 else "ok",
    )  # fmt: skip
    said = operator.post(f"/classes/{row.pk}/preview/", typed(row, ttft_s="0.0002", simulate="1")).json()
    worker.next_experiment()
    preview = Experiment.objects.get(slug=said["slug"])
    assert (preview.state, preview.error) == ("done", "")
    rows = {each["name"]: each for each in compared(preview.result)}
    assert rows["interactive"]["before"] > 0.9
    assert rows["interactive"]["after"] == 0
    assert rows["batch"]["after"] > 0.9, "the other class keeps its targets"
    assert rows["interactive"]["recorded"] == pytest.approx(75 / 149), "one of 150 was given up by its client"
    assert (rows["batch"]["recorded"], rows["all traffic"]["recorded"]) == (0, pytest.approx(75 / 299))
    page = operator.get(f"/previews/{preview.slug}/").content.decode()
    assert "All <strong>300</strong> requests for demo in the last hour, <time" in page
    assert "25.1 %" in page
    assert rows["batch"]["ttft_of"] == [], "all of them had one"
    was, edited = rows["interactive"]["ttft_of"]
    assert min(was, edited) < 150, "the client that hung up was of this class"
    assert f"{was} and {edited} with a first token" in page
    assert "interactive" in page
    assert "<html" not in page
    assert "Edit of class" not in operator.get("/experiments/").content.decode(), "previews are nobody's experiment"


def test_nothing_to_simulate_says_why(operator):
    row = factories.slo_class(name="interactive")
    said = operator.post(f"/classes/{row.pk}/preview/", typed(row, simulate="1")).json()
    assert said["refused"] == "The simulation cannot run: no model exists yet."
    data.traffic(5)
    said = operator.post(f"/classes/{row.pk}/preview/", typed(row, simulate="1")).json()
    assert said["refused"] == "The simulation cannot run: no instance serves 'demo' now, so there is no current fleet."


def test_a_new_preview_takes_the_place_of_the_one_before(operator):
    data.fleet()
    row = factories.slo_class(name="interactive")
    data.traffic(5)
    first, second = (
        operator.post(f"/classes/{row.pk}/preview/", typed(row, simulate="1")).json()["slug"] for _ in range(2)
    )
    assert Experiment.objects.get(slug=first).state == "cancelled"
    assert Experiment.objects.get(slug=second).state == "queued"


def test_a_preview_is_its_askers_alone(signed_in):
    data.fleet()
    row = factories.slo_class(name="interactive")
    data.traffic(5)
    slug = signed_in("operator").post(f"/classes/{row.pk}/preview/", typed(row, simulate="1")).json()["slug"]
    assert signed_in("operator").get(f"/previews/{slug}/").status_code == 404
    assert signed_in("viewer").get(f"/previews/{slug}/").status_code == 403


def mapping_form(row, **changes):
    levels = {
        f"levels-{place}-{name}": value for place, level in enumerate(row.levels) for name, value in level.items()
    }
    count = str(len(row.levels))
    return {
        "window": row.window, "window_age_s": row.window_age_s, "contention": row.contention, "version": row.version,
        "levels-TOTAL_FORMS": count, "levels-INITIAL_FORMS": "0", **levels, **changes,
    }  # fmt: skip


def test_a_mapping_is_previewed_and_its_errors_stand_at_their_level(operator):
    row = factories.priority_mapping()
    data.traffic(10, priority=0, slo_class="priority-0", decisions=slo("priority", history="no_history"))
    said = operator.post(f"/mappings/{row.pk}/preview/", mapping_form(row)).json()
    assert "of the 10 requests" in said["html"]
    wrong = operator.post(f"/mappings/{row.pk}/preview/", mapping_form(row, **{"levels-0-ttft_s": "0"})).json()
    assert set(wrong["errors"]) == {"levels-0-ttft_s"}


def test_history_shows_each_change_and_leads_back(operator, viewer):
    row = factories.slo_class(name="interactive")
    own = factories.slo_class(name="interactive", tenant=factories.tenant())
    slo_class_update(actor=data.OLGA, slo_class_id=row.pk, version=1, changes={"ttft_s": 0.5})
    slo_class_update(actor=data.OLGA, slo_class_id=own.pk, version=1, changes={"ttft_s": 0.25})
    page = viewer.get(f"/classes/{row.pk}/history/").content.decode()
    assert "<del>1 s</del>" in page
    assert "<ins>500 ms</ins>" in page
    assert "0.25" not in page, "the tenant's class has a history of its own"
    assert "Revert" not in page.replace("Revert opens", "")
    page = operator.get(f"/classes/{row.pk}/history/").content.decode()
    decision = Decision.objects.get(outcome__id=row.pk, kind="slo_class_updated")
    assert f"/classes/{row.pk}/?restore={decision.pk}" in page
    assert 'value="1.0"' in operator.get(f"/classes/{row.pk}/?restore={decision.pk}").content.decode()


def test_a_mapping_is_changed_back(operator):
    row = factories.priority_mapping()
    wider = [{**factories.LEVEL, "ttft_max_s": 9.0}]
    priority_mapping_update(actor=data.OLGA, mapping_id=row.pk, version=1, changes={"levels": wider})
    decision = Decision.objects.get(kind="priority_mapping_updated")
    page = operator.get(f"/mappings/{row.pk}/history/").content.decode()
    assert f"?restore={decision.pk}" in page
    page = operator.get(f"/mappings/{row.pk}/?restore={decision.pk}").content.decode()
    assert "These are the values before that change" in page
    assert 'value="1.25"' in page
    row.refresh_from_db()
    row.levels = [factories.LEVEL]
    answer = operator.post(f"/mappings/{row.pk}/", mapping_form(row), follow=True).content.decode()
    assert "Revert" in answer
    assert PriorityMapping.objects.get().levels == [factories.LEVEL]


def test_requests_that_count_separately_are_in_neither_table(operator):
    row = factories.slo_class(name="interactive")
    ends = {1: ("cancelled", ""), 2: ("refused", "engine_rejected")}
    data.traffic(
        20,
        outcome=lambda n: ends.get(n, ("ok", ""))[0],
        error_code=lambda n: ends.get(n, ("ok", ""))[1],
        attained=lambda n: n not in ends,
    )
    said = operator.post(f"/classes/{row.pk}/preview/", typed(row, ttft_s="0.5")).json()
    assert "of the 18 requests" in said["html"]
    page = operator.get(f"/classes/{row.pk}/").content.decode()
    assert "without those that their clients cancelled or an engine refused" in page


def test_a_simulated_class_counts_the_requests_that_count():
    run = {"requests": 20, "attainment": 1.0, "ttft_s": {}, "tpot_s": {}}
    entry = {**run, "by_class": {"chat": run}}
    entries = [{"policy": label, "first_seed": entry} for label in (RECORDED, EDITED)]
    sample = {"attained": 1.0, "by_class": {"chat": 1.0}, "counted": {"chat": 18}}
    assert [each["requests"] for each in compared({"entries": entries, "sample": sample})] == [18, 18]
