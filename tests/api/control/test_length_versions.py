"""`/api/v1/length-versions`: the versions of each model's length forest."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from controller.models import LengthVersion
from controller.predict.answer_lengths import FEATURES
from tests import factories
from tests.console.live.live_data import fleet
from workers import live

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]


def version(number, **fields):
    at = timezone.now() - timedelta(seconds=60)
    given = {
        "model": "demo", "version": number, "trained_at": at, "first_at": at - timedelta(hours=2), "last_at": at,
        "answers": 9_600, "cut_answers": 120, "judged": 2_400, "coverage": 0.903, "class_coverage": 0.871,
        "pinball": 13.2, "class_pinball": 28.3, **fields,
    }  # fmt: skip
    return LengthVersion.objects.create(**given)


def test_each_model_has_its_versions_and_which_is_in_force(viewer):
    factories.served_model(name="demo")
    factories.served_model(name="new")
    by_tokens = [{"tokens": 0, "answers": 5, "coverage": 0.9}, {"tokens": 50, "answers": 0, "coverage": None}]
    version(1, digest="0" * 64, content=b"forest", coverage_by_tokens=by_tokens)
    version(2, refused="its loss is too high")
    features = [0.0] * len(FEATURES)
    factories.records_stored(
        *(
            factories.record(
                model="demo", length_version=1, length_bounds=[1, most], length_features=features, output_tokens=20
            )
            for most in (40, 10)
        )
    )
    answer = viewer.get("/length-versions")
    assert answer.status_code == 200
    demo, new = answer.data["items"]
    assert (demo["model"], demo["in_force"], demo["recent_answers"], demo["recent_coverage"]) == ("demo", 1, 2, 0.5)
    assert [row["version"] for row in demo["versions"]] == [2, 1]
    assert demo["versions"][0]["refused"] == "its loss is too high"
    assert (demo["versions"][1]["coverage"], demo["versions"][1]["answers"]) == (0.903, 9_600)
    assert [dict(each) for each in demo["versions"][1]["coverage_by_tokens"]] == by_tokens
    assert demo["versions"][0]["coverage_by_tokens"] == []
    assert "content" not in demo["versions"][1]
    assert (new["in_force"], new["recent_coverage"], new["versions"]) == (None, None, [])


def test_a_version_stays_in_force_while_all_that_follow_are_refused(viewer):
    factories.served_model(name="demo")
    version(1, digest="0" * 64, content=b"forest")
    for number in range(2, 14):
        version(number, refused="its loss is too high")
    (demo,) = viewer.get("/length-versions").data["items"]
    assert demo["in_force"] == 1
    assert [row["version"] for row in demo["versions"]] == [*range(13, 3, -1), 1]


def test_gateways_are_listed_with_what_they_use_and_null_without_redis(viewer, monkeypatch):
    factories.served_model(name="demo")
    row = version(1, digest="b" * 64, content=b"forest")
    told = {"what": "lengths", "subject": "demo", "version": 1, "digest": "b" * 64, "problem": ""}
    told["taken_at"] = (row.trained_at + timedelta(seconds=2)).timestamp()
    reports = [fleet(gateway="gw-a", at=timezone.now().timestamp(), learned=[told])]
    monkeypatch.setattr(live, "read_fleet", lambda: reports)
    (gateway,) = viewer.get("/length-versions").data["items"][0]["gateways"]
    assert (gateway["gateway"], gateway["state"], gateway["version"]) == ("gw-a", "current", 1)
    assert gateway["seconds"] == pytest.approx(2.0)

    def away():
        raise live.LiveUnavailable("Redis is unavailable: test")

    monkeypatch.setattr(live, "read_fleet", away)
    answer = viewer.get("/length-versions")
    assert (answer.status_code, answer.data["items"][0]["gateways"]) == (200, None)
    assert viewer.get("/graph-versions").status_code == 200
