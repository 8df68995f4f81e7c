"""The console's benchmark: its data fills the real schema, its delays are counted from each probe's own end."""

from __future__ import annotations

import pytest

from benchmarks.console import live
from benchmarks.console import preview as console_preview
from benchmarks.console.data import fill
from benchmarks.console.queue import queue_costs
from controller.models import AttainmentMinute, Decision, Instance, InstanceDevice, RequestRecord, ScalingSample


@pytest.mark.django_db(transaction=True)
def test_the_data_is_as_much_as_was_asked_for():
    fill(records=500, decisions=60, instances=10, hours=2.0)
    assert RequestRecord.objects.count() == 500
    assert Decision.objects.filter(subject_type="scaling_policy").count() == 54
    assert (Instance.objects.count(), InstanceDevice.objects.count()) == (10, 10)
    assert sum(AttainmentMinute.objects.values_list("finished", flat=True)) == 500
    assert ScalingSample.objects.exists()
    row = RequestRecord.objects.filter(outcome="ok").first()
    assert row.decisions[1]["rejected"]
    assert 0.7 < RequestRecord.objects.filter(attained=True).count() / 500 < 1.0


@pytest.mark.django_db(transaction=True)
def test_an_edit_is_simulated_on_both_fleets_and_how_many_requests_is_told(monkeypatch, unsent_experiments):
    """The demo's load of a minute in place of an hour."""
    monkeypatch.setattr(console_preview, "HOUR_S", 60.0)
    monkeypatch.setattr("workers.experiments.preview_sample.PLANNED_S", 120.0)  # however busy the test's machine
    fill(records=400, decisions=20, instances=10, hours=0.1)
    found = console_preview.previews()
    sent = list(console_preview.demands_of_an_hour())
    assert {name: (each["requests"], each["of"], each["error"]) for name, each in found.items()} == {
        "100 engines": (200, 200, ""),
        "demo": (len(sent), len(sent), ""),
    }
    assert {each.slo_class for each in sent} == {"interactive", "standard", "batch", "priority-0"}
    assert all(each["cpu_s"] > 0 and each["preview_s"] > 0 for each in found.values())


def test_a_probe_is_seen_when_the_count_reaches_it():
    watcher = live.Watcher()
    for count, at in ((1, 10.2), (1, 10.4), (4, 11.0)):
        watcher._reached(count, at)
    assert watcher.seen == {1: 10.2, 2: 11.0, 3: 11.0, 4: 11.0}
    ended = [10.0, 10.5, 10.9, 11.1, 12.0]
    assert live.delays(ended, watcher.seen) == [pytest.approx(each) for each in (0.2, 0.5, 0.1, 0.0, live.LATE_S)]


def test_a_long_queue_is_followed_to_its_end_and_costs_are_told():
    """It raises where the picture is not the queue."""
    told = queue_costs(waiting=5_000)
    assert (told["waiting"], told["changes_per_s"]) == (4_999, 400)
    assert 0 < told["frame_kb"] < told["message_kb"] < told["whole_kb"]
