"""Experiments page: asked in two clicks or by the form, watched, drawn, exported, named, cancelled, removed."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.utils import timezone

from console.views.experiments import window_of
from controller.models import Decision, Experiment, ScalingPolicy, ScalingSample, Trace
from tests import experiment_data as data
from tests import factories
from workers.experiments import runner as worker

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("unsent_experiments")]


def typed(**changes):
    """The form as a browser sends it: a mix on a shipped profile, two policies."""
    contenders = changes.pop("contenders", [("slackline", "0"), ("round_robin", "-1")])
    rows = {}
    for place in range(4):
        policy, change = contenders[place] if place < len(contenders) else ("", "0")
        rows |= {f"contenders-{place}-policy": policy, f"contenders-{place}-change": change}
    return {
        "name": "", "kind": "mix", "mix": "4-task", "rate": "20", "duration_s": "3", "cv": "1",
        "fleet": "profile", "profile": "llama-3.1-8b-a100", "count": "2", "rates": "", "seeds": "1",
        "contenders-TOTAL_FORMS": "4", "contenders-INITIAL_FORMS": "0", **rows, **changes,
    }  # fmt: skip


def done(**changes):
    row = data.experiment(**changes)
    worker.next_experiment()
    return Experiment.objects.get(pk=row.pk)


def test_the_form_asks_and_leads_to_the_experiment(operator):
    answer = operator.post("/experiments/new/", typed())
    row = Experiment.objects.get()
    assert (answer.status_code, answer["location"]) == (302, f"/experiments/{row.slug}/")
    assert row.name == "HyperFlexis 4-task (Table 1): slackline vs. round robin, 1 fewer instance"
    assert [each["instances"][0]["count"] for each in row.spec["policies"]] == [2, 1]
    page = operator.get(answer["location"]).content.decode()
    assert "Waiting for a worker" in page
    worker.next_experiment()
    page = operator.get(answer["location"]).content.decode()
    assert "Time to first token" in page
    assert 'id="experiment-charts"' in page
    assert "round robin, 1 fewer instance" in page


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"rate": "-1"}, "rate", "greater than or equal"),
        ({"rate": ""}, "rate", "This field is required"),
        ({"kind": "window", "since": "2026-11-21T10:00:00", "until": "2026-11-21T09:00:00"}, "until", "after the"),
        ({"kind": "window", "since": "x", "until": "2026-11-21T09:00:00"}, "since", "valid date"),
        ({"kind": "trace", "trace": "nobody", "trace_ttft_s": "1", "trace_tpot_s": "1"}, "trace", "not one of"),
        ({"rates": "1, two"}, "rates", "&#x27;two&#x27; is not a valid rate"),
        ({"seeds": "9"}, "seeds", "less than or equal to 5"),
        ({"contenders": [("slackline", "-2")]}, "contenders-0-change", "at least 1"),
        ({"contenders": [("slackline", "0"), ("slackline", "0")]}, "contenders-1-policy", "Same as a variant above"),
        ({"contenders": []}, "contenders-0-policy", "Select at least one"),
        ({"fleet": "today"}, "fleet", "no instance serves"),
        ({"mix": "own"}, "prompt_mean", "This field is required"),
        ({"duration_s": "86400", "rate": "50"}, None, "limit of 100,000"),
    ],
)  # fmt: skip
def test_what_is_wrong_stands_at_its_field_on_the_page_and_while_one_types(operator, changes, field, words):
    data.factories.served_model(name="demo")
    form = typed(**changes)
    answer = operator.post("/experiments/new/", form)
    page = answer.content.decode()
    assert answer.status_code == 422, page
    assert words in page
    assert field is None or f'id="id_{field}_error"' in page
    said = operator.post("/experiments/check/", form).json()
    assert (field or "__all__") in said["errors"]
    assert not Experiment.objects.exists()


def test_checking_says_how_much_work_it_is_and_stores_nothing(operator):
    said = operator.post("/experiments/check/", typed(rates="10,20", seeds="2")).json()
    assert said == {"errors": {}, "summary": "8 runs of about 60 requests (limit: 100,000 per run)."}
    assert not Experiment.objects.exists()


def test_yesterday_is_the_calendar_day_in_utc():
    now = datetime(2026, 11, 21, 15, 30, tzinfo=UTC)
    since, until = window_of("yesterday", now)
    assert (since.isoformat(), until.isoformat()) == ("2026-11-20T00:00:00+00:00", "2026-11-21T00:00:00+00:00")


def test_yesterday_with_one_instance_less_is_one_click_from_the_list(operator):
    data.fleet()
    assert "Yesterday (UTC) with one fewer instance" in operator.get("/experiments/").content.decode()
    midnight = time.time() // 86_400 * 86_400
    data.traffic(30, ending=midnight - 3600)
    answer = operator.post("/experiments/ask/", {"window": "yesterday", "change": "less"})
    row = Experiment.objects.get()
    assert answer["location"] == f"/experiments/{row.slug}/"
    assert row.name == "Yesterday (UTC) with 1 fewer instance"
    worker.next_experiment()
    row.refresh_from_db()
    assert [(each["policy"], each["instances"]) for each in row.result["entries"]] == [
        ("unchanged", 2), ("1 fewer instance", 1),
    ]  # fmt: skip
    assert "the number of instances at that time is not recorded" in operator.get(answer["location"]).content.decode()
    assert row.result["entries"][0]["first_seed"]["requests"] == 30


def test_a_question_without_an_answer_says_why(operator):
    data.fleet(instances=1)
    page = operator.post("/experiments/ask/", {"window": "hour", "change": "more"}, follow=True).content.decode()
    assert "no request for demo is recorded" in page
    data.traffic(5)
    page = operator.post("/experiments/ask/", {"window": "hour", "change": "less"}, follow=True).content.decode()
    assert "would leave 0" in page
    assert not Experiment.objects.exists()


def test_the_fleet_of_then_is_compared_with_one_less_of_it(operator):
    """One instance at first, three after half of the traffic."""
    model = data.fleet(instances=2)
    data.traffic(40, every_s=1.0)
    half = timezone.now() - timedelta(seconds=25)
    for at, ready in ((half - timedelta(seconds=30), 1), (half, 3)):
        ScalingSample.objects.create(
            policy=ScalingPolicy.objects.first() or factories.scaling_policy(model), at=at, load=0.5, ready=ready,
            starting=0, draining=0, mind="steady",
        )  # fmt: skip
    form = typed(
        kind="window",
        fleet="then",
        since=f"{half - timedelta(minutes=5):%Y-%m-%dT%H:%M:%S}",
        until=f"{timezone.now():%Y-%m-%dT%H:%M:%S}",
    )
    assert operator.post("/experiments/new/", form).status_code == 302
    worker.next_experiment()
    row = Experiment.objects.get()
    assert (row.state, row.error) == ("done", "")
    first = row.result["entries"][0]
    assert (first["instances_least"], first["instances"]) == (1, 3)
    page = operator.get(f"/experiments/{row.slug}/").content.decode()
    assert "1 to 3 instances" in page
    assert "Uses the number of instances that the scaler recorded: 1 to 3." in page


def test_the_fleet_of_then_needs_recorded_traffic(operator):
    page = operator.post("/experiments/new/", typed(fleet="then")).content.decode()
    assert "Available for recorded traffic only" in page
    assert 'id="id_fleet_error"' in page


def test_the_first_token_times_say_whose_they_are(viewer):
    row = done(rates=[10], seeds=[1])
    (first, *_) = row.result["entries"]
    seen, asked = first["first_seed"]["first_tokens"], first["first_seed"]["requests"]
    assert seen == asked - sum(n for name, n in first["first_seed"]["outcomes"].items() if name != "ok")
    for count, said in (
        (asked, f"all {asked} requests"), (1, f"1 of {asked} requests"), (0, f"none of {asked} requests"),
        (None, "those with a first token"),
    ):  # fmt: skip
        first["first_seed"].pop("first_tokens", None)
        if count is not None:
            first["first_seed"]["first_tokens"] = count
        row.save()
        page = viewer.get(f"/experiments/{row.slug}/").content.decode()
        assert f'<span class="sub">{said}</span>' in page


def test_charts_have_units_and_slo_lines(viewer):
    row = done(rates=[10, 40], seeds=[1, 2])
    page = viewer.get(f"/experiments/{row.slug}/").content.decode()
    text = page.split('id="experiment-charts" type="application/json">')[1].split("</script>")[0]
    charts = json.loads(text)
    assert set(charts["over_rates"]) == {"attainment_rates", "goodput_rates"}
    first = charts["by_rate"]["0"]
    assert set(first) == {"attainment", "goodput", "ttft", "tpot", "cost", "queue"}
    assert all(spec["layout"]["y_title"] for spec in (first["attainment"], first["goodput"], first["cost"]))
    (line,) = first["ttft"]["wikisql"]["layout"]["lines"]
    assert (line["text"], "x" in line) == ("beyond this chart: SLO 20 s", False), "no request took half of it"
    assert first["attainment"]["layout"]["lines"][0]["text"] == "SLO 90 %"
    assert [trace["name"] for trace in first["cost"]["traces"]] == ["slackline", "round_robin"]


def test_exports_are_files(viewer):
    row = done()
    csv = viewer.get(f"/experiments/{row.slug}/csv/")
    assert csv["content-disposition"] == f'attachment; filename="{row.slug}.csv"'
    assert csv.content.decode().count("\n") == 11
    whole = viewer.get(f"/experiments/{row.slug}/json/").json()
    assert whole["result"]["entries"][0]["policy"] == "slackline"
    assert viewer.get(f"/experiments/{data.experiment().slug}/csv/").status_code == 404


def test_named_kept_cancelled_removed(operator):
    row = data.experiment()
    path = f"/experiments/{row.slug}/"
    operator.post(f"{path}change/", {"name": "Mine <b>", "kept": "on", "version": "1"})
    row.refresh_from_db()
    assert (row.name, row.kept) == ("Mine <b>", True)
    late = operator.post(f"{path}change/", {"name": "Late", "version": "1"}, follow=True).content.decode()
    assert "was changed by someone else" in late
    assert "you entered “Late”, not kept" in late
    assert "Mine &lt;b&gt;" in late
    operator.post(f"{path}cancel/")
    row.refresh_from_db()
    assert row.state == "cancelled"
    operator.post(f"{path}remove/")
    assert not Experiment.objects.exists()


def test_a_failed_one_says_why_and_where(viewer):
    row = data.experiment()
    Experiment.objects.filter(pk=row.pk).update(state="failed", error="It broke", error_field="settings.cutoff_s")
    page = viewer.get(f"/experiments/{row.slug}/").content.decode()
    assert "It broke" in page
    assert "settings.cutoff_s" in page
    assert "It broke" in viewer.get("/experiments/?state=failed").content.decode()


def test_a_viewer_changes_nothing_and_that_is_audited(viewer):
    row = data.experiment()
    for path in ("new/", "check/", "ask/", f"{row.slug}/change/", f"{row.slug}/cancel/", f"{row.slug}/remove/"):
        assert viewer.post(f"/experiments/{path}").status_code == 403
    assert viewer.post("/traces/").status_code == 403
    assert Decision.objects.filter(kind="access_refused").count() == 7
    page = viewer.get("/experiments/").content.decode()
    assert "one fewer instance" not in page
    assert "New experiment" not in page


def test_traces_are_handed_in_and_removed(operator):
    file = SimpleUploadedFile("t.csv", b"input_tokens,output_tokens\n10,x\n")
    wrong = operator.post("/traces/", {"name": "mine", "file": file})
    assert (wrong.status_code, b"line 2, output_tokens" in wrong.content) == (422, True)
    file = SimpleUploadedFile("t.csv", b"input_tokens,output_tokens\n10,2\n")
    page = operator.post("/traces/", {"name": "mine", "file": file}, follow=True).content.decode()
    assert "Trace mine uploaded with 1 request." in page
    trace = Trace.objects.get()
    form = typed(kind="trace", trace=trace.slug, trace_ttft_s="1", trace_tpot_s="0.1")
    assert operator.post("/experiments/new/", form).status_code == 302
    operator.post(f"/traces/{trace.slug}/remove/")
    assert Trace.objects.exists(), "an experiment waits for it"
    Experiment.objects.update(state="cancelled")
    operator.post(f"/traces/{trace.slug}/remove/")
    assert not Trace.objects.exists()


@pytest.mark.parametrize("field", ["tenant", "slo_class"])
def test_a_filter_that_leaves_nothing_is_marked_itself(operator, field):
    data.fleet()
    data.traffic(5)
    now = timezone.now()
    window = {"since": f"{now - timedelta(hours=1):%Y-%m-%dT%H:%M:%S}", "until": f"{now:%Y-%m-%dT%H:%M:%S}"}
    form = typed(kind="window", model="demo", **window, **{field: "nope"})
    said = operator.post("/experiments/check/", form).json()
    assert list(said["errors"]) == [field]
    assert "nope" in str(said["errors"][field])
    answer = operator.post("/experiments/new/", form)
    assert (answer.status_code, f'id="id_{field}_error"' in answer.content.decode()) == (422, True)
