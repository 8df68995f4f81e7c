"""Priority mapping: levels and windows, with their bounds."""

from __future__ import annotations

import pytest

from tests import factories

LEVEL = {"ttft_s": 1.0, "ttft_min_s": 0.5, "ttft_max_s": 2.0, "tpot_s": 0.1, "tpot_min_s": 0.05, "tpot_max_s": 0.2}


@pytest.fixture
def row(db):
    return factories.priority_mapping(levels=[LEVEL, {**LEVEL, "ttft_s": 1.5}])


def form(row, *levels, **fields):
    data = {"window": 500, "window_age_s": 60, "contention": "strict", "version": row.version}
    data |= {"levels-TOTAL_FORMS": len(levels), "levels-INITIAL_FORMS": 0}
    for index, level in enumerate(levels):
        data |= {f"levels-{index}-{name}": value for name, value in level.items()}
    return {**data, **fields}


def test_levels_and_windows_are_saved_together(operator, row):
    answer = operator.post(f"/mappings/{row.pk}/", form(row, LEVEL, LEVEL, {**LEVEL, "ttft_s": 2.0}))
    assert answer.status_code == 302
    row.refresh_from_db()
    assert (row.window, row.contention, row.version) == (500, "strict", 2)
    assert [level["ttft_s"] for level in row.levels] == [1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("level", "place"),
    [
        ({**LEVEL, "ttft_s": 3.0}, "levels-1-ttft_s"),  # outside its range
        ({**LEVEL, "ttft_min_s": 5.0}, "levels-1-ttft_max_s"),  # range turned round
        ({**LEVEL, "ttft_s": 0.6}, "levels-1-ttft_s"),  # tighter than the level above
        ({**LEVEL, "tpot_s": ""}, "levels-1-tpot_s"),
        ({}, "levels-1-ttft_s"),  # a level left empty is not "no level"
    ],
)
def test_a_level_that_makes_no_sense_is_marked(operator, row, level, place):
    answer = operator.post(f"/mappings/{row.pk}/", form(row, LEVEL, level))
    assert answer.status_code == 422
    assert f'id="id_{place}_error"' in answer.content.decode()
    row.refresh_from_db()
    assert row.version == 1


def test_one_level_is_the_least(operator, row):
    assert operator.post(f"/mappings/{row.pk}/", form(row)).status_code == 422


def test_a_conflict_shows_the_levels_of_both(operator, row):
    operator.post(f"/mappings/{row.pk}/", form(row, LEVEL))
    answer = operator.post(f"/mappings/{row.pk}/", form(row, {**LEVEL, "ttft_s": 1.2}))
    assert answer.status_code == 409
    html = answer.content.decode()
    assert "at first 1 s" in html
    assert "at first 1.2 s" in html
