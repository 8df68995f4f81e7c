"""HyperFlexis Alg. 2 and eq. 6 against worked examples H9 and H10."""

import pytest

from controller.core.snapshot import LevelBounds, MappingConfig
from controller.slo.mapping import PriorityMapper, priority_index


def level(ttft, low, high):
    return LevelBounds(ttft, 0.1, low, high, 0.05, 0.2)


@pytest.fixture
def mapping():
    """H10: two levels; level 1 is 1.0 s +- 25 %, level 0 starts low enough to relax level 1 to it."""
    made = PriorityMapper(MappingConfig(None, (level(0.3, 0.2, 0.4), level(1.0, 0.75, 1.25))))
    rows = ((0, 0.2, 0.05), (0, 0.3, 0.1), (0, 0.4, 0.15), (1, 0.5, 0.2), (1, 1.0, 0.7), (1, 2.0, 1.6))
    for at, (priority, ttft, queue) in enumerate(rows):
        made.observe(priority, ttft, None, queue, float(at))
    return made


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([10, 20, 30, 40], [2, 18, 48, 92]),
        ([3, 2, 0, 0], [0, 3, 4, 4]),
        ([5, 0, 0, 0], [1, 4, 4, 4]),
        ([0, 0, 0, 1], [0, 0, 0, 0]),
    ],
)
def test_index_is_clamped_to_the_window(counts, expected):
    assert [priority_index(p, counts) for p in range(4)] == expected


def test_index_uses_integers():
    assert priority_index(6, [0] * 6 + [90] + [0, 0]) == 63


def test_an_empty_window_has_no_index():
    with pytest.raises(ValueError, match="empty window"):
        priority_index(0, [0, 0])


def test_highest_priority_reads_its_own_quantile(mapping):
    assigned = mapping.assign(0, higher_pending=False, now=6.0)
    assert assigned.reference_ttft_s == 0.3


def test_queue_spike_is_taken_out_and_the_strict_bound_holds(mapping):
    mapping.observe(1, None, None, 9.9, 6.0)  # no TTFT: not a finished reference
    newest = PriorityMapper(mapping.config)
    rows = ((0, 0.2, 0.05), (0, 0.3, 0.1), (0, 0.4, 0.15), (1, 1.0, 0.7), (1, 2.0, 1.6), (1, 0.5, 0.2))
    for at, (priority, ttft, queue) in enumerate(rows):
        newest.observe(priority, ttft, None, queue, float(at))
    strict = newest.assign(1, higher_pending=True, now=6.0)
    assert strict.reference_ttft_s == 2.0
    assert strict.queue_correction_s == pytest.approx(1.4)
    assert strict.ttft_s == 0.75
    relaxed = newest.assign(1, higher_pending=False, now=6.0)
    assert relaxed.ttft_s == pytest.approx(0.6)
    assert newest.assign(1, higher_pending=False, now=6.0) == relaxed


def test_a_queue_building_up_is_clamped_above(mapping):
    grown = PriorityMapper(mapping.config)
    rows = ((0, 0.2, 0.05), (0, 0.3, 0.1), (0, 0.4, 0.15), (1, 0.5, 0.2), (1, 2.0, 1.6), (1, 1.0, 2.4))
    for at, (priority, ttft, queue) in enumerate(rows):
        grown.observe(priority, ttft, None, queue, float(at))
    assigned = grown.assign(1, higher_pending=False, now=6.0)
    assert assigned.queue_correction_s == pytest.approx(-0.8)
    assert assigned.ttft_s == 1.25


def test_without_history_the_configured_target_applies():
    fresh = PriorityMapper(MappingConfig(None, (level(0.3, 0.2, 0.4), level(1.0, 0.75, 1.25))))
    assigned = fresh.assign(1, higher_pending=False, now=0.0)
    assert (assigned.ttft_s, assigned.tpot_s, assigned.reason) == (1.0, 0.1, "no_history")


def test_old_values_leave_by_age_and_count():
    config = MappingConfig(None, (level(0.3, 0.0, 9.0),), window=2, window_age_s=10.0)
    window = PriorityMapper(config)
    for at, ttft in ((0.0, 5.0), (1.0, 1.0), (2.0, 2.0)):
        window.observe(0, ttft, None, 0.0, at)
    assert window.assign(0, False, 3.0).reference_ttft_s == 2.0  # two values left: index 1
    assert window.assign(0, False, 11.5).reference_ttft_s == 2.0
    assert window.assign(0, False, 20.0).reason == "no_history"


def test_strict_rule_never_relaxes():
    config = MappingConfig(None, (level(0.3, 0.2, 0.4), level(1.0, 0.75, 1.25)), contention="strict")
    strict = PriorityMapper(config)
    strict.observe(1, 0.1, 0.01, 0.0, 0.0)
    assert strict.assign(1, False, 0.0).ttft_s == 0.75
    assert strict.assign(1, False, 0.0).tpot_s == 0.05


def test_requests_without_a_first_token_still_tell_their_queue_time(mapping):
    before = mapping.assign(1, False, 6.0).queue_correction_s
    mapping.observe(1, None, None, 0.2, 6.0)
    assert mapping.assign(1, False, 6.0).queue_correction_s != before


def test_priorities_beyond_the_last_level_share_it(mapping):
    assert mapping.level(7) == 1
