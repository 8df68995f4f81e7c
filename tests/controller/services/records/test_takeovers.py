"""What gateways did with published versions is stored once for each outcome, and goes with the versions."""

from __future__ import annotations

import pytest

from api.openai.state.storage import Database
from controller.core.messages import GRAPHS, LENGTHS
from controller.models import GraphVersion, LearnedTakeover, LengthVersion
from controller.predict.answer_lengths import VersionOutcome
from controller.services.records import learned_versions
from controller.services.records.takeovers import takeovers_write
from tests.console.views.traffic.test_lengths import version
from tests.factories import NOON

pytestmark = pytest.mark.django_db


def write(*outcomes, gateway="gw-a", what=LENGTHS):
    given = [VersionOutcome("demo", number, problem, NOON + at) for number, problem, at in outcomes]
    takeovers_write(gateway=gateway, what=what, outcomes=given)


def stored():
    rows = LearnedTakeover.objects.order_by("id")
    return [(row.gateway, row.version, row.problem, row.times, row.last_at.timestamp() - NOON) for row in rows]


def test_a_takeover_again_counts_and_one_that_is_written_again_does_not():
    write((1, "", 0.0), (2, "", 5.0))
    write((2, "", 5.0))
    write((2, "", 9.0), (2, "it is damaged", 10.0))
    write((2, "", 7.0), gateway="gw-b")
    assert stored() == [
        ("gw-a", 1, "", 1, 0.0),
        ("gw-a", 2, "", 2, 9.0),
        ("gw-a", 2, "it is damaged", 1, 10.0),
        ("gw-b", 2, "", 1, 7.0),
    ]
    write((2, "", 6.0))
    assert stored()[1] == ("gw-a", 2, "", 2, 9.0), "one that was overtaken"


def test_what_no_column_takes_is_cut():
    write((1, "x\x00y" + "z" * 900, 0.0), gateway="g" * 900)
    ((gateway, _, problem, *_),) = stored()
    assert gateway == "g" * 150
    assert problem == "xy" + "z" * 198


def test_a_gateway_stores_them_by_its_database(monkeypatch):
    monkeypatch.setattr("django.db.close_old_connections", lambda: None)  # the test's own has its transaction
    Database().version_outcomes("gw-a", GRAPHS, [VersionOutcome("acme", 4, "it is damaged", NOON)])
    assert stored() == [("gw-a", 4, "it is damaged", 1, 0.0)]


def test_takeovers_go_with_their_versions_and_no_others(monkeypatch):
    monkeypatch.setattr(learned_versions, "VERSIONS_KEPT", 2)
    monkeypatch.setattr(learned_versions, "CONTENTS_KEPT", 1)
    version(1)
    write((1, "", 0.0), (2, "", 0.0))
    write((1, "", 0.0), what=GRAPHS)
    figures = {
        name: getattr(LengthVersion.objects.get(), name)
        for name in ("first_at", "last_at", "answers", "cut_answers", "judged", "coverage", "class_coverage", "pinball",
                     "class_pinball")
    }  # fmt: skip
    for _ in range(2):
        learned_versions.learned_version_store(LengthVersion, {"model": "demo"}, None, refused="too wide", **figures)
    assert list(LengthVersion.objects.order_by("version").values_list("version", flat=True)) == [1, 2, 3]
    assert len(stored()) == 3, "the first version is still in use"
    learned_versions.learned_version_store(LengthVersion, {"model": "demo"}, b"forest", **figures)
    left = LearnedTakeover.objects.order_by("id").values_list("what", "version")
    assert (list(left), GraphVersion.objects.count()) == ([(GRAPHS, 1)], 0)
