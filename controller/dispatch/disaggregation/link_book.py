"""What the migrator believes of the links between prefill and decode instances.

Two sources: engines that keep links report them, and every transfer says how it went, which is all there is for
engines that do not (vLLM, SGLang). A link on which transfers failed in a row is closed for a while, then tried by one:
what becomes of that one opens it for all or closes it again, one that vanishes leaves the trial to the next, and one
whose word is not to be waited for opens it until something fails. How it stands is asked of its owner each time, so no
end of a transfer can be forgotten here. Others that fail meanwhile were sent before, and tell of that time only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from enum import Enum
from typing import NamedTuple

from controller.core.kv_links import KvMoved, LinkState

NEWEST = 0.3  # weight of the newest sample in a mean
LONGEST_CLOSED_S = 30.0
Pair = tuple[str, str]  # source, target


class Trial(Enum):
    """How the transfer that tries a link stands."""

    ON_ITS_WAY = "on its way"
    UNHEARD = "unheard"  # it did not fail for as long as anybody waits for its word, which may come in minutes
    VANISHED = "vanished"


Ask = Callable[[float], Trial]  # at that time


class LinkView(NamedTuple):
    """`closed`: by what transfers said, whatever its engine reports; while one tries it, closed for the others."""

    source: str
    target: str
    state: LinkState
    closed: bool
    bandwidth_bytes_s: float | None
    latency_s: float | None


class _Link:
    __slots__ = (
        "bandwidth",
        "closed_for",
        "failures",
        "latency",
        "opens_at",
        "s_a_token",
        "state",
        "trial",
        "tried_at",
        "tried_by",
    )

    def __init__(self) -> None:
        self.state = LinkState.CONNECTING
        self.bandwidth: float | None = None
        self.latency: float | None = None
        self.s_a_token: float | None = None  # as transfers measured it
        self.failures = 0  # in a row
        self.opens_at = -math.inf
        self.closed_for = 0.0
        self.trial: Ask | None = None
        self.tried_by: object = None
        self.tried_at = -math.inf

    def closed(self, now: float) -> bool:
        return now < self.opens_at or self.tried(now)

    def tried(self, now: float) -> bool:
        return now >= self.opens_at and self.trial is not None and self.trial(now) is Trial.ON_ITS_WAY

    def opens_to_all(self) -> None:
        self.opens_at, self.trial, self.tried_by = -math.inf, None, None


class LinkBook:
    """Links by (source, target); one that nobody spoke of is taken as usable. Times are the caller's seconds.

    `max_failures` transfers failing in a row close a link for `closed_s`, and for twice as long, half a minute at most,
    each time the one that is tried then fails too.
    """

    def __init__(self, max_failures: int, closed_s: float) -> None:
        self._max_failures = max_failures
        self._closed_s = closed_s
        self._links: dict[Pair, _Link] = {}
        self._bytes_a_token: dict[str, float] = {}  # by source: its model's

    def seen(self, pair: Pair, state: LinkState, bandwidth_bytes_s: float | None, latency_s: float | None) -> None:
        """Its engine's report."""
        link = self._link(pair)
        link.state, link.latency = state, latency_s
        link.bandwidth = bandwidth_bytes_s or link.bandwidth

    def placed(self, pair: Pair, by: object, trial: Ask, now: float) -> None:
        """The transfer `by` takes it. Over a link that was closed and may be taken again it is the one that tries it,
        as long as `trial` says so; over any other it is one of many. Behind one that was not heard of the link is open
        for all, or it would carry one at a time for as long as answers last; the next failure closes it at once."""
        link = self._links.get(pair)
        if link is None or link.opens_at == -math.inf or link.closed(now):
            return
        if link.trial is not None and link.trial(now) is Trial.UNHEARD:
            link.opens_to_all()
        else:
            link.trial, link.tried_by, link.tried_at = trial, by, now

    def moved(self, pair: Pair, moved: KvMoved | None) -> None:
        """A transfer arrived; None: nobody measured it."""
        link = self._link(pair)
        link.failures, link.closed_for = 0, 0.0
        link.opens_to_all()
        if moved is not None and moved.tokens > 0 and moved.seconds > 0:
            if not moved.early_bytes:  # the others waited for their prefill too
                link.s_a_token = _mean(link.s_a_token, moved.seconds / moved.tokens)
            self._bytes_a_token[pair[0]] = _mean(self._bytes_a_token.get(pair[0]), moved.bytes / moved.tokens)

    def failed(self, pair: Pair, by: object, now: float) -> None:
        """The transfer `by`. Of many that one blip cut the first few close the link; the rest, however late they are
        heard of, say nothing new: it was closed for them already, and who tries it says whether it is good now."""
        link = self._link(pair)
        link.failures += 1
        tries = link.trial is not None and link.tried_by is by
        if link.failures >= self._max_failures and (tries or link.opens_at == -math.inf):
            link.closed_for = min(2 * link.closed_for, LONGEST_CLOSED_S) or self._closed_s
            link.opens_at, link.trial, link.tried_by = now + link.closed_for, None, None

    def forget(self, instance_id: str, known: Container[str]) -> None:
        """It is gone: a new one of that name begins anew. With it goes what was said late of others that are not
        `known` any more."""
        ends = {end for pair in self._links for end in pair}
        gone = {end for end in ends if end == instance_id or end not in known}
        self._links = {pair: link for pair, link in self._links.items() if gone.isdisjoint(pair)}
        self._bytes_a_token = {end: size for end, size in self._bytes_a_token.items() if end not in gone}

    def usable(self, pair: Pair, now: float) -> bool:
        link = self._links.get(pair)
        return link is None or (link.state is not LinkState.DOWN and not link.closed(now))

    def tried(self, pair: Pair, patience_s: float, now: float) -> bool:
        """Is it closed for no other reason than that one tries it, not for longer than `patience_s`?"""
        link = self._links.get(pair)
        if link is None or link.state is LinkState.DOWN or now >= link.tried_at + patience_s:
            return False
        return link.tried(now)

    def down(self, pair: Pair) -> bool:
        """Its engine says so."""
        link = self._links.get(pair)
        return link is not None and link.state is LinkState.DOWN

    def move_s(self, pair: Pair, tokens: int) -> float | None:
        """Seconds that so many tokens' KV takes, from what was measured; None: nothing was."""
        link = self._links.get(pair)
        if link is None:
            return None
        size = self._bytes_a_token.get(pair[0])
        if link.bandwidth and size is not None:
            return (link.latency or 0.0) + tokens * size / link.bandwidth
        return None if link.s_a_token is None else tokens * link.s_a_token

    def moves(self, source: str, targets: Sequence[str], tokens: int) -> dict[str, float]:
        """The same for each target; a link that was not measured takes the mean of those that were (0 without any)."""
        took = {target: self.move_s((source, target), tokens) for target in targets}
        known = [seconds for seconds in took.values() if seconds is not None]
        mean = sum(known) / len(known) if known else 0.0
        return {target: mean if seconds is None else seconds for target, seconds in took.items()}

    def views(self, now: float) -> list[LinkView]:
        return [
            LinkView(*pair, link.state, link.closed(now), link.bandwidth, link.latency)
            for pair, link in sorted(self._links.items())
        ]

    def _link(self, pair: Pair) -> _Link:
        return self._links.setdefault(pair, _Link())


def _mean(before: float | None, sample: float) -> float:
    return sample if before is None else before + NEWEST * (sample - before)
