"""The history of versions: earlier ones with their results, and which gateway took which over when, or why not."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.urls import reverse

from console.views.traffic.version_history import PAGE_ROWS
from controller.core.messages import GRAPHS, LENGTHS
from controller.predict.answer_lengths import MOST_AGE_S, VersionOutcome
from controller.services.records.takeovers import takeovers_write
from tests import factories
from tests.console.views.traffic.test_lengths import graph_version, version

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]


def shown(client, **query):
    answer = client.get(reverse("version-history"), query)
    assert answer.status_code == 200
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", answer.content.decode()))


def row_of(text, number):
    return text[text.index(f"Version {number} ") :].split("Version ")[1]


def outcome(row, problem="", after_s=2.5, subject="demo"):
    return VersionOutcome(subject, row.version, problem, (row.trained_at + timedelta(seconds=after_s)).timestamp())


def test_each_version_says_which_gateways_took_it_over_when_and_why_others_did_not(viewer):
    rows = [version(number, age_s=3_600.0 - number) for number in (1, 2)]
    version(3, refused="its loss is 30.8 tokens; constant quantiles of each class have a loss of 28.5")
    again = [outcome(rows[1], after_s=after_s) for after_s in (2.5, 60, 90)]
    takeovers_write(gateway="gw-a", what=LENGTHS, outcomes=[outcome(rows[0]), *again])
    takeovers_write(gateway="gw-b", what=LENGTHS, outcomes=[outcome(rows[1], "it is damaged", after_s=3.0)])
    takeovers_write(gateway="gw-z", what=LENGTHS, outcomes=[outcome(rows[1], subject="another")])
    takeovers_write(gateway="gw-y", what=GRAPHS, outcomes=[outcome(rows[1])])
    text = shown(viewer, model="demo")
    assert "Answer lengths of demo: history" in text
    first, second, third = (row_of(text, number) for number in (1, 2, 3))
    assert "passed" in first
    assert re.search(r"gw-a took it over \S+ \S+ UTC ?, 2.50 s after training", first)
    assert "times" not in first
    assert "in use" in second
    assert "2.50 s after training; 3 times, the last one" in second
    assert "gw-b did not use it: it is damaged" in second
    assert second.index("gw-a") < second.index("gw-b"), "as they came"
    assert "failed its loss is 30.8 tokens" in third
    assert "not published" in third
    assert "gw-z" not in text
    assert "gw-y" not in text


def test_pattern_graphs_have_a_history_too(viewer):
    row = graph_version(1, age_s=MOST_AGE_S + 60)
    outcomes = [outcome(row, subject="acme"), outcome(row, "it was trained more than 7 days ago", 700_000, "acme")]
    takeovers_write(gateway="gw-a", what=GRAPHS, outcomes=outcomes)
    text = shown(viewer, tenant="acme")
    assert "Pattern graphs of acme: history" in text
    assert "passed" in text
    assert "in use" not in text, "it is too old"
    assert text.index("gw-a took it over") < text.index("gw-a did not use it: it was trained more than 7 days ago")
    assert "91.4 %" in text


def test_versions_of_before_takeovers_were_recorded_say_so(viewer):
    version(1)
    assert "none recorded" in shown(viewer, model="demo")


def test_many_versions_have_pages(viewer):
    for number in range(1, 2 * PAGE_ROWS + 2):
        version(number, age_s=9_000.0 - number)
    pages = [shown(viewer, model="demo", page=number) for number in (1, 2, 3)]
    assert [len(re.findall(r"Version \d+ ", page)) for page in pages] == [PAGE_ROWS, PAGE_ROWS, 1]
    assert "Page 2 of 3, 41 versions" in pages[1]
    assert "?model=demo&amp;page=3" in viewer.get("/lengths/history/?model=demo&page=2").content.decode()
    for odd in ("0", "-1", "x", "9" * 30):
        assert "Page " in shown(viewer, model="demo", page=odd)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({}, "Choose a model or a tenant"),
        ({"model": "nobody"}, "Nothing has been trained for nobody yet"),
        ({"tenant": "nobody"}, "Nothing has been trained for nobody yet"),
        ({"model": "\x00"}, "Choose a model or a tenant"),
        ({"tenant": "x" * 500}, "Nothing has been trained for " + 120 * "x" + " yet"),
    ],
)
def test_without_versions_it_says_so(viewer, query, said):
    text = shown(viewer, **query)
    assert "No versions" in text
    assert said in text


def test_it_is_reached_from_the_lengths_and_takes_few_queries(viewer, django_assert_max_num_queries):
    factories.served_model(name="org/demo & co")
    rows = [version(number, model="org/demo & co", age_s=99.0 - number) for number in range(1, 30)]
    takeovers_write(gateway="gw-a", what=LENGTHS, outcomes=[outcome(row, subject="org/demo & co") for row in rows])
    graph_version(1)
    page = viewer.get("/lengths/").content.decode()
    link = "/lengths/history/?model=org%2Fdemo%20%26%20co"
    assert f'href="{link}"' in page
    assert 'href="/lengths/history/?tenant=acme"' in page
    with django_assert_max_num_queries(6):
        text = viewer.get(link).content.decode()
    assert len(re.findall(r"gw-a\s+took it over", text)) == PAGE_ROWS
