"""One rule for what is too old to be taken for now."""

from __future__ import annotations

import pytest

from controller.core.staleness import is_fresh, stale_after_s


@pytest.mark.parametrize(("period_s", "limit_s"), [(0.05, 3.0), (1.0, 3.0), (2.0, 6.0), (5.0, 15.0)])
def test_three_periods_and_three_seconds_at_least(period_s, limit_s):
    assert stale_after_s(period_s) == limit_s
    assert is_fresh(100.0, period_s, 100.0 + limit_s)
    assert not is_fresh(100.0, period_s, 100.01 + limit_s)
