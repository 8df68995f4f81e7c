"""The knee is found from either side, and its absence is said."""

import pytest

from benchmarks.load.knee import NoKnee, find_knee


def falling(rate: float) -> float:
    """1.0 up to 25 requests/s, then down by 0.02 per request/s: 0.9 is crossed at exactly 30."""
    return 1.0 - 0.02 * max(0.0, rate - 25)


@pytest.mark.parametrize("start", [10.0, 29.0, 31.0, 60.0])
def test_knee_from_either_side(start):
    knee, measured = find_knee(falling, start)
    assert knee == pytest.approx(30, rel=0.04)
    assert measured == sorted(measured)
    rates = [rate for rate, _ in measured]
    assert any(rate <= knee for rate in rates)
    assert any(rate >= knee for rate in rates)


def test_each_rate_is_measured_once():
    seen = []
    find_knee(lambda rate: seen.append(rate) or falling(rate), 20.0)
    assert len(seen) == len(set(seen))


def test_no_knee_is_an_error():
    with pytest.raises(NoKnee, match="1\\.00"):
        find_knee(lambda rate: 1.0, 10.0)
    with pytest.raises(NoKnee, match="0\\.10"):
        find_knee(lambda rate: 0.1, 10.0)
