"""Priority mapping: levels and windows, with their bounds."""

from __future__ import annotations

import pytest

from controller.models import PriorityMapping
from controller.services.slo.priority_mappings import LEVELS_MAX
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


TIGHTER = "Must not be tighter than the target of the next higher priority."
# As an operator typed it: the second of four levels below the first, so that two more pairs are looked at after it.
OUT_OF_ORDER = [
    {**LEVEL, "ttft_s": 0.7},
    {**LEVEL, "ttft_s": 0.6, "ttft_min_s": 0.55},
    {**LEVEL, "ttft_s": 1.2},
    {**LEVEL, "ttft_s": 1.5},
]


def marked(html, place):
    """What stands at a field."""
    return html.split(f'id="id_{place}_error"')[1].split("</ul>")[0]


def test_a_level_between_others_that_is_tighter_is_marked_and_what_was_typed_kept(operator, row):
    answer = operator.post(f"/mappings/{row.pk}/", form(row, *OUT_OF_ORDER))
    assert answer.status_code == 422
    html = answer.content.decode()
    assert TIGHTER in marked(html, "levels-1-ttft_s")
    assert html.count(TIGHTER) == 1
    assert 'name="levels-1-ttft_min_s" value="0.55"' in html
    row.refresh_from_db()
    assert row.version == 1


def test_a_preview_marks_a_level_between_others_that_is_tighter(operator, row):
    said = operator.post(f"/mappings/{row.pk}/preview/", form(row, *OUT_OF_ORDER)).json()
    assert said["errors"] == {"levels-1-ttft_s": [TIGHTER]}


def test_each_level_that_is_tighter_is_marked_for_both_targets(operator, row):
    falling = [{**LEVEL, "ttft_s": 1.0 - step, "tpot_s": 0.1 - step / 10} for step in (0.0, 0.1, 0.2)]
    said = operator.post(f"/mappings/{row.pk}/preview/", form(row, *falling)).json()
    assert set(said["errors"]) == {f"levels-{index}-{name}" for index in (1, 2) for name in ("ttft_s", "tpot_s")}


def test_a_stored_mapping_out_of_order_opens_with_the_error_at_its_field(operator, row):
    """Stored before the control API refused it."""
    PriorityMapping.objects.filter(pk=row.pk).update(levels=OUT_OF_ORDER)
    answer = operator.get(f"/mappings/{row.pk}/")
    assert answer.status_code == 200
    html = answer.content.decode()
    assert TIGHTER in marked(html, "levels-1-ttft_s")
    assert html.count(TIGHTER) == 1
    assert "Not saved" not in html, "nobody tried to"
    assert operator.post(f"/mappings/{row.pk}/", form(row, *OUT_OF_ORDER)).status_code == 422
    assert operator.post(f"/mappings/{row.pk}/", form(row, LEVEL, LEVEL)).status_code == 302
    assert TIGHTER not in operator.get(f"/mappings/{row.pk}/").content.decode()


def test_a_stored_level_without_a_number_opens_too(operator, row):
    PriorityMapping.objects.filter(pk=row.pk).update(levels=[LEVEL, {"ttft_s": None}])
    assert operator.get(f"/mappings/{row.pk}/").status_code == 200


def test_one_level_is_the_least(operator, row):
    assert operator.post(f"/mappings/{row.pk}/", form(row)).status_code == 422


def test_a_conflict_shows_the_levels_of_both(operator, row):
    operator.post(f"/mappings/{row.pk}/", form(row, LEVEL))
    answer = operator.post(f"/mappings/{row.pk}/", form(row, {**LEVEL, "ttft_s": 1.2}))
    assert answer.status_code == 412
    html = answer.content.decode()
    assert "initially 1 s" in html
    assert "initially 1.2 s" in html


def test_saving_again_keeps_levels_that_only_the_other_person_changed(operator, row):
    seen = row.levels
    operator.post(f"/mappings/{row.pk}/", form(row, {**LEVEL, "ttft_s": 1.2}))
    answer = operator.post(f"/mappings/{row.pk}/", {**form(row, *seen), "window": "77"})
    html = answer.content.decode()
    assert (answer.status_code, "not changed by you" in html) == (412, True)
    assert 'value="1.2"' in html
    assert 'value="77"' in html


def test_as_many_levels_are_saved_as_the_service_takes(operator, row):
    PriorityMapping.objects.update(levels=[LEVEL] * LEVELS_MAX)
    page = operator.get(f"/mappings/{row.pk}/").content.decode()
    assert page.count('-ttft_s"') >= LEVELS_MAX
    assert operator.post(f"/mappings/{row.pk}/", form(row, *[LEVEL] * LEVELS_MAX)).status_code == 302
    row.refresh_from_db()
    more = operator.post(f"/mappings/{row.pk}/", form(row, *[LEVEL] * (LEVELS_MAX + 1)))
    assert (more.status_code, len(row.levels)) == (422, LEVELS_MAX)
