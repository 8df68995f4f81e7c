"""Which TTFT may arrive next: the targets of recent traffic (the "tightest TTFT" of eq. 5, a choice of ours)."""

from __future__ import annotations

from collections import Counter, deque

REFRESH_S = 0.5


class RecentTargets:
    """TTFT targets of the last `window_s` seconds.

    `tightest` is their `share` quantile: 0 is the minimum; a few percent keep one odd request from shrinking the whole
    fleet's budget.
    """

    def __init__(self, window_s: float, share: float, limit: int = 2_000) -> None:
        self._window_s = window_s
        self._share = share
        self._limit = limit
        self._seen: deque[tuple[float, float]] = deque()
        self._counts: Counter[float] = Counter()
        self._tightest: float | None = None
        self._fresh_until = 0.0

    def add(self, ttft_s: float, now: float) -> None:
        self._seen.append((now, ttft_s))
        self._counts[ttft_s] += 1
        if self._tightest is None or ttft_s < self._tightest:
            self._fresh_until = now  # recompute: it may be the new tightest
        if len(self._seen) > self._limit:
            self._forget()

    def tightest(self, now: float, default: float) -> float:
        """Seconds; `default` where there was no traffic."""
        if now < self._fresh_until and self._tightest is not None:
            return self._tightest
        while self._seen and self._seen[0][0] < now - self._window_s:
            self._forget()
        self._fresh_until = now + REFRESH_S
        self._tightest = self._quantile()
        return default if self._tightest is None else self._tightest

    def _quantile(self) -> float | None:
        if not self._seen:
            return None
        wanted = self._share * len(self._seen)
        seen = 0
        ordered = sorted(self._counts)
        for ttft in ordered:
            seen += self._counts[ttft]
            if seen > wanted:
                return ttft
        return ordered[-1]

    def _forget(self) -> None:
        _, ttft = self._seen.popleft()
        self._counts[ttft] -= 1
        if not self._counts[ttft]:
            del self._counts[ttft]
