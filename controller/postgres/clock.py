"""PostgreSQL's clock, which all processes that ask it share."""

from __future__ import annotations

import time
from datetime import datetime

LEAST_AHEAD_S = 0.5  # less may be the time that the query took


def ahead_of_host(asked_at: datetime) -> float:
    """Seconds to add to this host's clock for PostgreSQL's, which was `asked_at` (`Now`) in a query that has just
    ended; 0 while they differ by less than `LEAST_AHEAD_S`. Error: what the answer took to come."""
    ahead_s = asked_at.timestamp() - time.time()
    return ahead_s if abs(ahead_s) >= LEAST_AHEAD_S else 0.0
