"""Health of a link to another engine, derived from its pings and transfers. No sockets, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from controller.core.kv_links import LinkReport, LinkState

SMALLEST_BYTES = 1 << 18  # a smaller transfer says more about latency than about bandwidth
NEWEST = 0.3  # weight of the newest sample in a mean
BEST_FADES = 0.99  # per sample: an old best counts less and less


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """When a link is degraded: below `slow_share` of the best bandwidth seen, or within `remember_s` of a failure."""

    slow_share: float = 0.25
    remember_s: float = 10.0


class LinkHealth:
    """State and figures of one link. Times are the caller's monotonic seconds."""

    def __init__(self, limits: LinkLimits | None = None) -> None:
        self.limits = limits or LinkLimits()
        self.latency_s: float | None = None
        self.bandwidth_bytes_s: float | None = None
        self.bytes = self.transfers = self.failures = 0
        self.measurements = 0  # of its bandwidth
        self.last_error = ""
        self.down_since: float | None = None
        self._known = False
        self._failed_at: float | None = None
        self._best = 0.0
        self._unmeasured = False  # a transfer since then was not limited by the link, or `doubted`

    def connected(self) -> None:
        self._known, self.down_since = True, None

    def answered(self, round_trip_s: float) -> None:
        """A ping came back."""
        self.latency_s = _mean(self.latency_s, round_trip_s / 2)

    def measured(self, nbytes: int, seconds: float) -> None:
        """Bytes received in that time, whether a transfer succeeded or not."""
        if nbytes >= SMALLEST_BYTES and seconds > 0:
            self.bandwidth_bytes_s = _mean(self.bandwidth_bytes_s, nbytes / seconds)
            self._best = max(self.bandwidth_bytes_s, self._best * BEST_FADES)
            self._unmeasured = False
            self.measurements += 1

    def moved(self, nbytes: int, seconds: float) -> None:
        """A transfer succeeded. `seconds` 0: it was limited by something other than the link."""
        self._unmeasured = self._unmeasured or seconds <= 0
        self.transfers, self.bytes = self.transfers + 1, self.bytes + nbytes
        self.measured(nbytes, seconds)

    def doubted(self) -> None:
        """Nothing is read over it since its bandwidth looks too low, or a transfer took longer than it should have."""
        self._unmeasured = True

    def failed(self, error: str, now: float, nbytes: int = 0) -> None:
        """A transfer failed after `nbytes`. Says nothing about whether the link still answers."""
        self.failures, self.bytes = self.failures + 1, self.bytes + nbytes
        self.last_error, self._failed_at = error, now

    def lost(self, error: str, now: float) -> None:
        """The peer stopped answering, or has never answered."""
        self._known, self.last_error, self._failed_at = True, error, now
        if self.down_since is None:
            self.down_since = now

    @property
    def slow(self) -> bool:
        """Its bandwidth is far below its best."""
        return (self.bandwidth_bytes_s or 0.0) < self.limits.slow_share * self._best

    @property
    def wants_probe(self) -> bool:
        """Its bandwidth is unknown, or may have changed without a transfer showing it."""
        return self.bandwidth_bytes_s is None or self._unmeasured or self.slow

    def state(self, now: float) -> LinkState:
        if not self._known:
            return LinkState.CONNECTING
        if self.down_since is not None:
            return LinkState.DOWN
        lately = self._failed_at is not None and now - self._failed_at < self.limits.remember_s
        return LinkState.DEGRADED if lately or self.slow else LinkState.UP

    def report(self, peer: str, host: str, port: int, now: float) -> LinkReport:
        return LinkReport(
            peer=peer,
            state=self.state(now),
            latency_s=self.latency_s,
            bandwidth_bytes_s=self.bandwidth_bytes_s,
            bytes=self.bytes,
            transfers=self.transfers,
            failures=self.failures,
            last_error=self.last_error,
            host=host,
            port=port,
        )


def _mean(before: float | None, sample: float) -> float:
    return sample if before is None else before + NEWEST * (sample - before)
