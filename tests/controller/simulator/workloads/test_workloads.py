import numpy as np
import pytest

from controller.core.errors import ConfigError
from controller.simulator.heap import EventHeap, EventKind
from controller.simulator.workloads.arrivals import LAWS, Lengths, renewal_times
from controller.simulator.workloads.mixes import FOUR_TASKS, MIXES, demands, mix


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_gaps_are_never_truncated(cv):
    """Cut gaps would offer more load than asked: the mean gap is 1 / rate within three standard errors."""
    count = 20_000
    gaps = np.diff([0.0, *renewal_times(np.random.default_rng(7), 5.0, count=count, cv=cv)])
    assert abs(gaps.mean() * 5.0 - 1) <= 3 * cv / count**0.5 + 1e-9
    assert gaps.std() * 5.0 == pytest.approx(cv, abs=0.1 + 0.05 * cv)
    if cv >= 1:
        assert gaps.max() * 5.0 > 6


def test_a_duration_ends_the_arrivals_and_a_count_bounds_them():
    rng = np.random.default_rng(1)
    times = renewal_times(rng, 100.0, until_s=3.0)
    assert times[-1] < 3.0
    assert 200 < len(times) < 400
    assert len(renewal_times(rng, 100.0, count=5)) == 5
    with pytest.raises(ConfigError, match="count or a duration"):
        renewal_times(rng, 1.0)


@pytest.mark.parametrize("law", LAWS)
def test_lengths_stay_in_bounds_with_their_mean(law):
    drawn = Lengths(200, 60, 20, 2000, law).draw(np.random.default_rng(3), 5000)
    assert drawn.min() >= 20
    assert drawn.max() <= 2000
    assert drawn.mean() == pytest.approx(1010 if law == "uniform" else 200, rel=0.05)


def test_lengths_out_of_reach_are_refused():
    with pytest.raises(ConfigError, match="bounds"):
        Lengths(10, 0.1, 5000, 5001).draw(np.random.default_rng(0), 10)


@pytest.mark.parametrize("name", MIXES)
def test_a_mix_offers_its_rate_in_equal_shares(name):
    tasks = mix(name)
    found = demands(tasks, 40.0, 5, duration_s=200)
    assert len(found) / 200 == pytest.approx(40.0, rel=0.05)
    for task in tasks:
        assert sum(d.slo_class == task.name for d in found) / 200 == pytest.approx(40.0 / len(tasks), rel=0.1)
    assert [d.at for d in found] == sorted(d.at for d in found)


def test_staggered_tasks_start_from_the_last_and_run_to_the_end():
    """HyperFlexis sec. 9.1: 15 requests/s, and 15 more every 20 s, up to 60."""
    found = demands(FOUR_TASKS, 60.0, 5, duration_s=90.0, stagger_s=20.0)
    for position, task in enumerate(reversed(FOUR_TASKS)):
        at = [d.at for d in found if d.slo_class == task.name]
        start = 20.0 * position
        assert start <= min(at) < start + 1.0
        assert max(at) > 89.0
        assert len(at) / (90.0 - start) == pytest.approx(15.0, rel=0.2)


def test_tasks_draw_from_generators_of_their_own():
    few, more = (demands(FOUR_TASKS[:n], 10.0 * n, 5, per_task=20) for n in (1, 3))
    assert [d for d in more if d.slo_class == "medical_qa"] == few


def test_the_heap_orders_by_time_then_kind_then_serial():
    heap = EventHeap()
    for at, kind, name in (
        (2.0, EventKind.STEP, "a"),
        (1.0, EventKind.WAKE, "b"),
        (1.0, EventKind.STEP, "c"),
        (1.0, EventKind.STEP, "d"),
    ):
        heap.push(at, kind, name)
    assert [heap.pop()[3] for _ in range(4)] == ["c", "d", "b", "a"]
    assert heap.now == 2.0
    with pytest.raises(ValueError, match="already"):
        heap.push(1.5, EventKind.STEP)
