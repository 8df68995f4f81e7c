"""Attainment of one request (HyperFlexis eq. 4, Concord ch. 3), and sliding windows over many requests."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from controller.core.messages import ClassWindow
from controller.core.types import Outcome, Outlook, RequestRecord, Targets

# Tolerance of comparisons with deadlines, since clocks are read a few microseconds late.
EPSILON_S = 1e-6


def judge(
    targets: Targets,
    outcome: Outcome,
    *,
    ttft_s: float | None,
    tpot_s: float | None,
    e2e_s: float | None,
    prompt_tokens: int,
    output_tokens: int,
    token_times: Sequence[float] | None,
    reasoning: int = 0,
) -> Outlook:
    """Judge a request against its targets; all times are seconds after its arrival.

    `token_times`: time of every token, if streamed. None means that the first token was not observed (not streamed):
    the end-to-end time is then compared with ttft + (n - 1) x tpot, for both targets. Only OK can be attained. An
    answer of one token has no TPOT and meets any.

    `reasoning`: how many of the tokens come before the answer. With a thinking deadline `ttft_s` is the time of the
    first token after them and `tpot_s` that of each further one; the reasoning counts as goodput if that deadline was
    met, as a deadline's tokens do.
    """
    if outcome is not Outcome.OK or e2e_s is None:
        return Outlook(False, False, False, False, 0)
    if token_times is None:
        allowed = targets.ttft_s + max(0, output_tokens - 1) * targets.tpot_s
        ttft_met = tpot_met = e2e_s <= allowed + EPSILON_S
        paced = output_tokens if ttft_met else 0
    else:
        thought = reasoning if targets.thinking_s is not None else 0
        first_due = targets.ttft_s if targets.thinking_s is None else targets.thinking_s
        ttft_met = ttft_s is not None and ttft_s <= first_due + EPSILON_S
        paced_tokens = output_tokens if not thought else len(token_times) - thought
        tpot_met = paced_tokens <= 1 or (tpot_s is not None and tpot_s <= targets.tpot_s + EPSILON_S)
        paced = token_goodput(token_times[thought:], first_due, targets.tpot_s) + (thought if ttft_met else 0)
    deadline_met = targets.deadline_s is None or e2e_s <= targets.deadline_s + EPSILON_S
    goodput = (
        paced
        if targets.deadline_s is None
        else deadline_goodput(e2e_s, targets.deadline_s, prompt_tokens, output_tokens)
    )
    return Outlook(ttft_met, tpot_met, deadline_met, ttft_met and tpot_met and deadline_met, goodput)


class _Entry(NamedTuple):
    at: float
    outcome: str
    attained: bool
    ttft_met: bool
    tpot_met: bool
    goodput: int
    ttft_s: float | None
    tpot_s: float | None
    miss_reason: str


class _ClassWindow:
    """The entries of one (tenant, class) in order, with running counts, so that a view need not scan them."""

    def __init__(self) -> None:
        self.entries: deque[_Entry] = deque()
        self.counts: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()

    def add(self, entry: _Entry) -> None:
        self.entries.append(entry)
        self._count(entry, 1)

    def forget(self) -> None:
        self._count(self.entries.popleft(), -1)

    def _count(self, entry: _Entry, step: int) -> None:
        self.counts[entry.outcome] += step
        if entry.outcome == Outcome.CANCELLED:
            return
        self.counts["finished"] += step
        self.counts["attained"] += step * entry.attained
        self.counts["ttft_met"] += step * entry.ttft_met
        self.counts["tpot_met"] += step * entry.tpot_met
        self.counts["goodput"] += step * entry.goodput
        if not entry.attained and entry.miss_reason:
            self.causes[entry.miss_reason] += step

    def span(self, now: float, limit: int, window_s: float) -> float:
        """Seconds that the counts cover; less than the window if older requests were dropped."""
        if len(self.entries) < limit:
            return window_s
        return max(1e-3, min(window_s, now - self.entries[0].at))

    def cause(self) -> str:
        """The most frequent cause of a miss; of equally frequent ones, the first by name."""
        causes = [(-count, name) for name, count in self.causes.items() if count > 0]
        return min(causes)[1] if causes else ""

    def latest(self, limit: int) -> list[_Entry]:
        """The last `limit`, oldest first."""
        return list(islice(reversed(self.entries), limit))[::-1]

    def newest(self, limit: int) -> list[_Entry]:
        """The newest requests that count, enough for quantiles."""
        return [e for e in islice(reversed(self.entries), limit) if e.outcome != Outcome.CANCELLED]


class AttainmentWindows:
    """Sliding windows by (tenant, class), each bounded to its newest `limit` requests.

    Counts are exact over the window; quantiles are over its newest QUANTILE_SAMPLES requests.
    """

    QUANTILE_SAMPLES = 500

    def __init__(self, window_s: float = 60.0, limit: int = 20_000) -> None:
        self.window_s = window_s
        self._limit = limit
        self._windows: dict[tuple[str, str], _ClassWindow] = {}

    def observe(self, record: RequestRecord, miss_reason: str, now: float) -> None:
        """Add a request that ended. `miss_reason`: short cause of its miss, "" if it was attained or cancelled."""
        window = self._windows.setdefault((record.tenant, record.slo_class), _ClassWindow())
        window.add(
            _Entry(
                now,
                record.counted_as,
                record.attained,
                record.ttft_met,
                record.tpot_met,
                record.goodput_tokens,
                record.ttft_s,
                record.tpot_s,
                miss_reason,
            )
        )
        if len(window.entries) > self._limit:
            window.forget()

    def state(self, now: float, most: int) -> list[Any]:
        """The newest `most` requests of each window, as JSON can hold them, with their age in seconds in place of the
        time of their end."""
        return [
            [*kind, [[now - each.at, *each[1:]] for each in window.latest(most)]]
            for kind, window in self._windows.items()
        ]

    def restore(self, state: Sequence[Any], now: float, since_s: float) -> None:
        """Go on from a state that was taken `since_s` ago. Raises TypeError or ValueError, and changes nothing, for
        anything else than a state."""
        windows: dict[tuple[str, str], _ClassWindow] = {}
        for tenant, slo_class, entries in state:
            window = windows[str(tenant), str(slo_class)] = _ClassWindow()
            for age_s, *rest in entries:
                window.add(_Entry(now - since_s - float(age_s), *rest))
        self._windows = windows

    def kinds(self) -> set[tuple[str, str]]:
        """The (tenant, class) pairs that have traffic in their window."""
        return set(self._windows)

    def view(
        self,
        now: float,
        queued: Mapping[tuple[str, str], tuple[int, float | None]],
        targets: Mapping[tuple[str, str], float],
    ) -> list[ClassWindow]:
        """One row for each (tenant, class) with traffic in the window or in the queue, sorted by name.

        `queued`: number of queued requests, and the smallest slack in seconds. `targets`: attainment targets (share
        0..1), 0.95 where absent.
        """
        for key in list(self._windows):
            window = self._windows[key]
            while window.entries and window.entries[0].at < now - self.window_s:
                window.forget()
            if not window.entries:
                del self._windows[key]
        keys = sorted(set(self._windows) | set(queued))
        return [self._row(key, queued.get(key, (0, None)), targets.get(key, 0.95), now) for key in keys]

    def _row(self, key: tuple[str, str], queued: tuple[int, float | None], target: float, now: float) -> ClassWindow:
        window = self._windows.get(key) or _ClassWindow()
        counts = window.counts
        newest = window.newest(self.QUANTILE_SAMPLES)
        ttfts = sorted(e.ttft_s for e in newest if e.ttft_s is not None)
        tpots = sorted(e.tpot_s for e in newest if e.tpot_s is not None)
        return ClassWindow(
            tenant=key[0],
            slo_class=key[1],
            window_s=window.span(now, self._limit, self.window_s),
            finished=counts["finished"],
            attained=counts["attained"],
            ttft_met=counts["ttft_met"],
            tpot_met=counts["tpot_met"],
            refused=counts[Outcome.REFUSED] + counts[Outcome.EXPIRED],
            failed=counts[Outcome.FAILED] + counts[Outcome.CUT],
            cancelled=counts[Outcome.CANCELLED],
            goodput_tokens=counts["goodput"],
            target=target,
            queued=queued[0],
            oldest_slack_s=queued[1],
            ttft_p50_s=quantile(ttfts, 0.5),
            ttft_p95_s=quantile(ttfts, 0.95),
            tpot_p50_s=quantile(tpots, 0.5),
            miss_reason=window.cause(),
            sampled=len(newest),
            first_tokens=len(ttfts),
            in_one_piece=sum(e.outcome == Outcome.OK and e.ttft_s is None for e in newest),
        )


def quantile(ascending: Sequence[float], share: float) -> float | None:
    """The nearest-rank quantile of sorted values; None if there are none."""
    if not ascending:
        return None
    rank = max(0, min(len(ascending) - 1, int(share * len(ascending) + 0.5) - 1))
    return ascending[rank]


# ---- goodput (Concord ch. 3) ----------------------------------------------------------------------------------------


def token_goodput(token_times: Sequence[float], ttft_s: float, tbt_s: float) -> int:
    """Number of tokens delivered by ttft + i x tbt, where i is 0 for the first one. A late token does not make later
    ones late.

    `token_times`: seconds after arrival.
    """
    return sum(at <= ttft_s + i * tbt_s + 1e-9 for i, at in enumerate(token_times))


def deadline_goodput(e2e_s: float, deadline_s: float, prompt_tokens: int, output_tokens: int) -> int:
    """Goodput of requests with a deadline: all prompt and output tokens, or none."""
    return prompt_tokens + output_tokens if e2e_s <= deadline_s + 1e-9 else 0
