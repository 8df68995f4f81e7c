"""Was it kept? Judging one request (HyperFlexis eq. 4, Concord ch. 3) and sliding windows over many."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from controller.core.messages import ClassWindow
from controller.core.records import RequestRecord
from controller.core.types import Outcome, Outlook, Targets
from controller.slo.goodput import deadline_goodput, token_goodput

# Deadlines are compared with this grace: clocks are read a few microseconds after the fact.
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
) -> Outlook:
    """Judge a request against its targets; all times are seconds after its arrival.

    `token_times` holds every token's time (streamed). None means that no first token was seen (not streamed): TTFT and
    TPOT are then judged together, end-to-end time against ttft + (n - 1) x tpot. Only OK can be attained; one token
    has no TPOT and meets it.
    """
    if outcome is not Outcome.OK or e2e_s is None:
        return Outlook(False, False, False, False, 0)
    if token_times is None:
        allowed = targets.ttft_s + max(0, output_tokens - 1) * targets.tpot_s
        ttft_met = tpot_met = e2e_s <= allowed + EPSILON_S
        paced = output_tokens if ttft_met else 0
    else:
        ttft_met = ttft_s is not None and ttft_s <= targets.ttft_s + EPSILON_S
        tpot_met = output_tokens <= 1 or (tpot_s is not None and tpot_s <= targets.tpot_s + EPSILON_S)
        paced = token_goodput(token_times, targets.ttft_s, targets.tpot_s)
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


class AttainmentWindows:
    """Sliding windows by (tenant, class). Memory is bounded: the newest `limit` requests of each window are kept."""

    def __init__(self, window_s: float = 60.0, limit: int = 5_000) -> None:
        self.window_s = window_s
        self._limit = limit
        self._entries: dict[tuple[str, str], deque[_Entry]] = {}

    def observe(self, record: RequestRecord, miss_reason: str, now: float) -> None:
        """A request ended. `miss_reason` is the short cause of its miss, "" when attained or cancelled."""
        key = (record.tenant, record.slo_class)
        entries = self._entries.setdefault(key, deque(maxlen=self._limit))
        entries.append(
            _Entry(
                now,
                record.outcome,
                record.attained,
                record.ttft_met,
                record.tpot_met,
                record.goodput_tokens,
                record.ttft_s,
                record.tpot_s,
                miss_reason,
            )
        )

    def view(
        self,
        now: float,
        queued: Mapping[tuple[str, str], tuple[int, float | None]],
        targets: Mapping[tuple[str, str], float],
    ) -> list[ClassWindow]:
        """One row for each (tenant, class) with traffic in the window or in the queue, sorted by name.

        `queued`: waiting requests and the smallest slack in seconds; `targets`: wanted attainment, 0.95 if missing.
        """
        for key in list(self._entries):
            entries = self._entries[key]
            while entries and entries[0].at < now - self.window_s:
                entries.popleft()
            if not entries:
                del self._entries[key]
        keys = sorted(set(self._entries) | set(queued))
        return [self._row(key, queued.get(key, (0, None)), targets.get(key, 0.95)) for key in keys]

    def _row(self, key: tuple[str, str], queued: tuple[int, float | None], target: float) -> ClassWindow:
        entries = self._entries.get(key, deque())
        counted = [e for e in entries if e.outcome != Outcome.CANCELLED]
        outcomes = Counter(e.outcome for e in entries)
        causes = Counter(e.miss_reason for e in counted if not e.attained and e.miss_reason)
        ttfts = sorted(e.ttft_s for e in counted if e.ttft_s is not None)
        tpots = sorted(e.tpot_s for e in counted if e.tpot_s is not None)
        return ClassWindow(
            tenant=key[0],
            slo_class=key[1],
            window_s=self.window_s,
            finished=len(counted),
            attained=sum(e.attained for e in counted),
            ttft_met=sum(e.ttft_met for e in counted),
            tpot_met=sum(e.tpot_met for e in counted),
            refused=outcomes[Outcome.REFUSED] + outcomes[Outcome.EXPIRED],
            failed=outcomes[Outcome.FAILED] + outcomes[Outcome.CUT],
            cancelled=outcomes[Outcome.CANCELLED],
            goodput_tokens=sum(e.goodput for e in counted),
            target=target,
            queued=queued[0],
            oldest_slack_s=queued[1],
            ttft_p50_s=quantile(ttfts, 0.5),
            ttft_p95_s=quantile(ttfts, 0.95),
            tpot_p50_s=quantile(tpots, 0.5),
            miss_reason=min(causes, key=lambda cause: (-causes[cause], cause)) if causes else "",
        )


def quantile(ascending: Sequence[float], share: float) -> float | None:
    """The nearest-rank quantile of sorted values; None for none."""
    if not ascending:
        return None
    rank = max(0, min(len(ascending) - 1, int(share * len(ascending) + 0.5) - 1))
    return ascending[rank]
