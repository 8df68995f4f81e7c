"""When a published message is stale. One rule for jobs, gateways, API and pages."""

from __future__ import annotations

STALE_PERIODS = 3.0  # messages older than three periods of their publisher are not acted on
STALE_AT_LEAST_S = 3.0  # lower bound for pages, so that a short period does not make them flicker


def stale_after_s(period_s: float) -> float:
    """Age in seconds above which a message that is published every `period_s` is shown as stale."""
    return max(STALE_AT_LEAST_S, STALE_PERIODS * period_s)


def is_fresh(at: float, period_s: float, now: float) -> bool:
    """`at` and `now`: seconds on one clock."""
    return now - at <= stale_after_s(period_s)
