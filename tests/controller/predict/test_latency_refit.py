"""Step times from bad records and a profile: a machine's noise must not become physics."""

import random
import statistics

import pytest

from controller.core.errors import ConfigError
from controller.core.types import LatencyCoefficients
from controller.predict.latency import LatencyModel
from controller.predict.latency_fit import relative_least_squares
from controller.predict.latency_records import Served, fit_records, intervals
from controller.predict.latency_refit import refit_profile
from controller.predict.latency_speed import SLOWEST, Interval, speed_over_time
from tests.controller.predict.test_latency_records import TRUTH, served

PROFILE = LatencyCoefficients(*(value / 1.6 for value in TRUTH))
SHAPES = [(0, 0, 5, 5000), (0, 0, 30, 30_000), (500, 250_000, 10, 10_000), (2000, 4_000_000, 40, 40_000)]


def bunched(seed=1, count=200):
    """A loaded engine on a machine that pauses, seen by a client that pauses as well: intervals last up to some times
    as long as their work, and of short ones next to nothing is left."""
    rng = random.Random(seed)
    everyone = served(count=count, rate=6.0)
    found = []
    for each in everyone:
        pauses = sum(rng.expovariate(2.0) for _ in range(rng.choice((0, 0, 1, 2))))
        first, last = each.first_at + pauses * rng.random(), each.last_at + pauses
        if rng.random() < 0.25:  # its tokens lay in a buffer and were read at once
            first = last - rng.uniform(0.001, 0.02)
        found.append(Served(each.prompt_tokens, each.output_tokens, first, max(last, first + 0.001)))
    return intervals(found, found)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_records_alone_say_nothing_where_the_machine_is_noisy(seed):
    """What least squares on relative error makes of them is no step time at all; it is refused."""
    rows = bunched(seed)
    degenerate = relative_least_squares(rows, 5)
    explained = [sum(x * k for x, k in zip(row, degenerate, strict=True)) / seconds for row, seconds in rows]
    assert statistics.median(explained) < 0.2
    with pytest.raises(ConfigError, match=r"contradict|no time") as caught:
        fit_records(rows, outlier=0.3)
    assert caught.value.field == "records"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_profile_holds_its_shape_on_noisy_records(seed):
    found = refit_profile(bunched(seed), PROFILE)
    assert min(found.prefill_a, found.prefill_b, found.decode_a, found.decode_b, found.decode_c) > 0
    for shape in SHAPES:
        assert LatencyModel(found).step(*shape) == pytest.approx(LatencyModel(TRUTH).step(*shape), rel=0.15)


@pytest.mark.parametrize("wrong", [(1.0, 1.0, 1.0), (1.5, 0.7, 1.0), (0.6, 1.3, 2.0)])
def test_clean_records_decide_whatever_the_profile_says(wrong):
    """Also where the profile is wrong by factors of 0.6 to 2."""
    everyone, (constant, tokens, batch) = served(), wrong
    profile = TRUTH._replace(
        decode_a=TRUTH.decode_a * constant, prefill_b=TRUTH.prefill_b * tokens, decode_c=TRUTH.decode_c * batch
    )
    found = LatencyModel(refit_profile(intervals(everyone, everyone), profile))
    for shape in SHAPES:
        allowed = 0.12 if wrong == (1.0, 1.0, 1.0) else 0.22
        assert found.step(*shape) == pytest.approx(LatencyModel(TRUTH).step(*shape), rel=allowed)


def test_a_pause_is_not_taken_for_the_prompts_that_arrived_in_it():
    """The longer an interval, the more prompts of others it holds: of noisy ones only the whole is believed."""
    found = refit_profile(bunched(), PROFILE)
    factors = [now / before for now, before in zip(found, PROFILE, strict=True) if before]
    assert max(factors) == pytest.approx(min(factors))


def test_what_a_profile_lacks_is_given_a_little_but_no_quadratic_term():
    everyone = served()
    rows = intervals(everyone, everyone)
    found = refit_profile(rows, LatencyCoefficients(0.01, 1e-4, 0.0, 0.01, 5e-6, 0.0))
    assert found.decode_c > 0
    assert found.prefill_c == 0.0


def test_a_mean_is_kept_not_the_luckiest_steps():
    """Half of the intervals as they should be, half with twice the time: 1.5 in all."""
    everyone = served()
    rows = [(row, seconds * (1 + i % 2)) for i, (row, seconds) in enumerate(intervals(everyone, everyone))]
    found = LatencyModel(refit_profile(rows, TRUTH))
    assert found.decode(10, 10_000) == pytest.approx(1.5 * LatencyModel(TRUTH).decode(10, 10_000), rel=0.12)


def test_a_stall_has_a_bounded_say():
    everyone = served()
    rows = intervals(everyone, everyone)
    stalled = [(row, seconds + (100.0 if i == 7 else 0.0)) for i, (row, seconds) in enumerate(rows)]
    clean, one = refit_profile(rows, TRUTH), refit_profile(stalled, TRUTH)
    assert one.decode_a == pytest.approx(clean.decode_a, rel=0.02)


@pytest.mark.parametrize(
    ("rows", "profile", "field"),
    [
        ([((1.0, 1.0, 1.0, 0.0, 0.0), 1.0)] * 3, TRUTH, "records"),
        ([((1.0, 1.0, 1.0, 0.0, 0.0), 1.0)] * 30, LatencyCoefficients(0, 0, 0, 0, 0, 0), "profile"),
        ([((1.0, 1.0, 1.0, 0.0, 0.0), 1.0)] * 30, TRUTH._replace(decode_b=-1e-6), "profile"),
    ],
)
def test_what_cannot_be_fitted_is_refused_by_name(rows, profile, field):
    with pytest.raises(ConfigError) as caught:
        refit_profile(rows, profile)
    assert caught.value.field == field


def test_speed_is_the_work_over_the_time_and_one_where_nothing_is_known():
    assert speed_over_time([Interval(2.0, 4.0, 1.0)], 1.0) == pytest.approx([1.0, 1.0, 0.5, 0.5])


def test_a_pause_is_found_where_it_was():
    """Speed 1 but for 0.05 in the fifth second, seen through 150 intervals of random begins and lengths."""
    rng = random.Random(5)

    def work(begin, end):
        slow = max(0.0, min(end, 5.0) - max(begin, 4.0))
        return (end - begin) - 0.95 * slow

    found = []
    for _ in range(150):
        begin = rng.uniform(0, 9)
        end = min(10.0, begin + rng.uniform(0.2, 2.0))
        found.append(Interval(begin, end, work(begin, end)))
    speeds = speed_over_time(found, 0.5)
    assert min(range(20), key=lambda k: speeds[k]) in (8, 9)
    assert sum(speeds[8:10]) / 2 < 0.45
    assert sum(speeds[:6]) / 6 == pytest.approx(1.0, abs=0.1)
    assert min(speeds) > SLOWEST / 2
    seen = sum(each.work_s for each in found)
    met = sum(
        speeds[k] * max(0.0, min(each.end, (k + 1) / 2) - max(each.begin, k / 2)) for each in found for k in range(20)
    )
    assert met == pytest.approx(seen)


def test_a_speed_without_work_is_refused():
    with pytest.raises(ConfigError):
        speed_over_time([Interval(1.0, 1.0, 1.0)], 0.5)
