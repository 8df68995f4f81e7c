"""`/api/v1/learned-takeovers`: what gateways did with versions of length forests and pattern graphs."""

from __future__ import annotations

import pytest

from controller.core.messages import GRAPHS, LENGTHS
from controller.predict.answer_lengths import VersionOutcome
from controller.services.records.takeovers import takeovers_write

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]
AT = 1_790_000_000.0


def stored():
    takeovers_write(gateway="gw-a", what=LENGTHS, outcomes=[VersionOutcome("demo", 1, "", AT)])
    again = [VersionOutcome("demo", 2, "", AT + after_s) for after_s in (10, 70)]
    takeovers_write(gateway="gw-a", what=LENGTHS, outcomes=again)
    takeovers_write(gateway="gw-b", what=LENGTHS, outcomes=[VersionOutcome("demo", 2, "it is damaged", AT + 11)])
    takeovers_write(gateway="gw-a", what=GRAPHS, outcomes=[VersionOutcome("acme", 2, "", AT + 12)])


def test_the_newest_come_first_with_times_and_problems(viewer):
    stored()
    answer = viewer.get("/learned-takeovers")
    assert answer.status_code == 200
    graphs, damaged, second, first = answer.data["items"]
    assert (graphs["what"], graphs["subject"]) == ("graphs", "acme")
    assert (damaged["gateway"], damaged["problem"], damaged["times"]) == ("gw-b", "it is damaged", 1)
    assert (second["version"], second["problem"], second["times"]) == (2, "", 2)
    assert second["first_at"] < second["last_at"]
    assert (first["version"], first["times"]) == (1, 1)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"what": "lengths"}, [("gw-b", 2), ("gw-a", 2), ("gw-a", 1)]),
        ({"subject": "acme"}, [("gw-a", 2)]),
        ({"what": "lengths", "version": 2, "gateway": "gw-a"}, [("gw-a", 2)]),
        ({"subject": "unknown"}, []),
    ],
)
def test_filters(viewer, query, found):
    stored()
    items = viewer.get("/learned-takeovers", **query).data["items"]
    assert [(each["gateway"], each["version"]) for each in items] == found


def test_pages_follow_each_other(viewer):
    stored()
    first = viewer.get("/learned-takeovers", limit=3).data
    rest = viewer.get("/learned-takeovers", limit=3, cursor=first["next_cursor"]).data
    assert len({each["id"] for each in first["items"] + rest["items"]}) == 4
    assert rest["next_cursor"] is None


@pytest.mark.parametrize(("name", "value"), [("what", "cutoffs"), ("version", 0), ("version", "two")])
def test_a_wrong_filter_is_named(viewer, name, value):
    answer = viewer.get("/learned-takeovers", **{name: value})
    assert answer.status_code == 400
    assert name in answer.data["error"]["fields"]
