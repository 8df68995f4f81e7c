"""What the migrator believes of the links between prefill and decode instances.

There are two sources: engines that keep links report them, and every transfer shows how its link is, which is the only
source for engines that keep none (vLLM, SGLang).

A link on which transfers failed in a row is closed for a while, then tried by one transfer. If that one arrives the
link is open for all; if it fails the link is closed again; if it vanishes the next one tries; if it will report nothing
soon the link is open until something fails. How the trying transfer stands is looked up each time, so that no end of a
transfer can be missed here. Others that fail meanwhile were sent before, and say nothing about the present.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from controller.core.kv_links import KvMoved, LinkState

NEWEST = 0.3  # weight of the newest sample in a mean
LONGEST_CLOSED_S = 30.0
PORT_KEEPS = 0.95  # of what earlier transfers showed of a port, for each new one
PORT_SAMPLES = 8  # transfers until a port's rate is believed
PAUSES = 0.25  # of the time in which a transfer moved, for as long it may have stood still in between
INBOUND_LATER = 8  # transfers to the same instance that end before one is looked at
Pair = tuple[str, str]  # source, target
Time = tuple[float, float]  # begin, end


class Trial(Enum):
    """How the transfer that tries a link stands."""

    ON_ITS_WAY = "on its way"
    UNHEARD = "unheard"  # it has not failed, and its result may take minutes
    VANISHED = "vanished"


Ask = Callable[[float], Trial]  # at that time


class LinkView(NamedTuple):
    """`closed`: after failed transfers, whatever its engine reports; while one tries it, closed for the others."""

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


class _Port:
    """What KV needs of the port through which it leaves an instance, as this gateway's transfers show it.

    Transfers at the same time share the port, so what one of them measures is not the port's rate. Counted is the time
    in which at least one moved, or was held while others were sent: KV of `tokens` took `busy_s` of it, the newest
    counting most. So what several gateways get, or several instances of a host, adds up to the rate of their port.
    """

    __slots__ = ("busy_s", "samples", "tokens", "until")

    def __init__(self) -> None:
        self.tokens = self.busy_s = 0.0
        self.samples = 0
        self.until = -math.inf  # the end of the newest

    def moved(self, tokens: int, seconds: float, now: float) -> None:
        """One ended, `seconds` after it had KV to send. Of times before the last one ended only that one's are counted,
        which a transfer that is overtaken by others makes a little too short."""
        busy_s = max(0.0, now - max(self.until, now - seconds))
        self.tokens = PORT_KEEPS * self.tokens + tokens
        self.busy_s = PORT_KEEPS * self.busy_s + busy_s
        self.until, self.samples = max(self.until, now), self.samples + 1

    @property
    def s_a_token(self) -> float | None:
        return self.busy_s / self.tokens if self.samples >= PORT_SAMPLES else None


class _InboundPort:
    """What KV needs of the port through which an instance receives it, as this gateway's transfers show it.

    One sender at a time shows its own port. Counted is the time in which at least two sent: of each transfer the part
    that overlaps with those of other sources, and all that came in that time. Each is looked at once those that began
    before its end have most likely ended too. Of one that was held or waited in between its engine tells when. Where
    it does not, the time from its first KV to its end is left out: with its mean rate at its end a port that many
    shared before looks as slow as the part that each of them got.
    """

    __slots__ = ("_newest", "busy_s", "samples", "tokens")

    def __init__(self) -> None:
        self.tokens = self.busy_s = 0.0
        self.samples = 0
        self._newest: deque[_Received] = deque(maxlen=2 * INBOUND_LATER + 1)

    def moved(
        self, source: str, tokens: int, seconds: float, span_s: float, pauses: Sequence[float], now: float
    ) -> None:
        """One from `source` ended. `seconds`: in which it had KV to send and was not held, `span_s`: from the first of
        it to the end, with pauses, of which the longest are told as in KvMoved."""
        parts = _parts(tokens, span_s, pauses, now)
        came_s = sum(part.end - part.begin for part in parts)
        if seconds <= 0 or came_s <= 0:
            return
        paused = came_s > (1.0 + PAUSES) * seconds
        if not pauses and not paused:
            parts = _parts(tokens, min(seconds, span_s), (), now)
        self._newest.append(_Received(source, parts, [part[:2] for part in parts], paused))
        if len(self._newest) <= INBOUND_LATER:
            return
        looked_at = self._newest[-1 - INBOUND_LATER]
        if looked_at.paused:
            return
        steady = [each for each in self._newest if not each.paused]
        together = _merged(looked_at.common(each for each in steady if each.source != looked_at.source))
        contended = _without(together, _merged(looked_at.common(each for each in self._newest if each.paused)))
        busy_s = sum(end - begin for begin, end in contended)
        if busy_s > 0:
            came = sum(each.tokens_in(contended) for each in steady)
            self.tokens = PORT_KEEPS * self.tokens + came
            self.busy_s = PORT_KEEPS * self.busy_s + busy_s
            self.samples += 1

    @property
    def s_a_token(self) -> float | None:
        return self.busy_s / self.tokens if self.samples >= PORT_SAMPLES else None


class _Received(NamedTuple):
    """`parts`: between its pauses; `times`: theirs. Of one that `paused` for longer than was told nobody knows when it
    moved."""

    source: str
    parts: Sequence[_Part]
    times: Sequence[Time]
    paused: bool

    def common(self, others: Iterable[_Received]) -> Iterator[Time]:
        """The times of this one in which another one moved."""
        return itertools.chain.from_iterable(_common(self.times, each.times) for each in others)

    def tokens_in(self, times: Sequence[Time]) -> float:
        """How much of it came then, as if each part had come at its mean rate. `times`: without overlaps."""
        if not times or self.times[0][0] >= times[-1][1] or self.times[-1][1] <= times[0][0]:
            return 0.0
        return sum(part.rate * sum(end - begin for begin, end in _common([part[:2]], times)) for part in self.parts)


class _Part(NamedTuple):
    """`rate`: tokens a second."""

    begin: float
    end: float
    rate: float


def _parts(tokens: int, span_s: float, pauses: Sequence[float], now: float) -> list[_Part]:
    """Of a transfer that ends now. What came in no time is left out."""
    found, begin, had = [], now - span_s, 0.0
    for since, until, share in (*zip(pauses[::3], pauses[1::3], pauses[2::3], strict=True), (0.0, 0.0, 1.0)):
        if now - since > begin:
            found.append(_Part(begin, now - since, (share - had) * tokens / (now - since - begin)))
        begin, had = max(begin, now - until), share
    return found


def _common(one: Sequence[Time], other: Sequence[Time]) -> list[Time]:
    """What is in both. Each without overlaps, the earliest first."""
    if not one or not other or one[0][0] >= other[-1][1] or other[0][0] >= one[-1][1]:
        return []
    found, at, there = [], 0, 0
    while at < len(one) and there < len(other):
        begin, end = max(one[at][0], other[there][0]), min(one[at][1], other[there][1])
        if begin < end:
            found.append((begin, end))
        if one[at][1] <= other[there][1]:
            at += 1
        else:
            there += 1
    return found


def _merged(times: Iterable[Time]) -> list[Time]:
    """Without overlaps."""
    found: list[Time] = []
    for begin, end in sorted(times):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _without(times: Iterable[Time], gaps: Sequence[Time]) -> list[Time]:
    """What is left of the times outside the gaps. Both as `_merged` returns them."""
    found: list[Time] = []
    for begin, end in times:
        at = begin
        for gap_begin, gap_end in gaps:
            if at < gap_begin < end:
                found.append((at, gap_begin))
            at = max(at, gap_end) if gap_begin < end else at
        if at < end:
            found.append((at, end))
    return found


class LinkBook:
    """Links by (source, target); an unknown one counts as usable. Times are the caller's seconds.

    `max_failures` transfers failing in a row close a link for `closed_s`; each time the one that tries it then fails
    too, for twice as long, half a minute at most.
    """

    def __init__(self, max_failures: int, closed_s: float) -> None:
        self._max_failures = max_failures
        self._closed_s = closed_s
        self._links: dict[Pair, _Link] = {}
        self._bytes_a_token: dict[str, float] = {}  # by source: its model's
        self._ports: dict[str, _Port] = {}  # by source
        self._inbound: dict[str, _InboundPort] = {}  # by target

    def seen(self, pair: Pair, state: LinkState, bandwidth_bytes_s: float | None, latency_s: float | None) -> None:
        """Its engine reported it."""
        link = self._link(pair)
        link.state, link.latency = state, latency_s
        link.bandwidth = bandwidth_bytes_s or link.bandwidth

    def placed(self, pair: Pair, by: object, trial: Ask, now: float) -> None:
        """The transfer `by` uses this link. If the link was closed and its time is over, this transfer tries it, for as
        long as `trial` says so. After one that reports nothing (UNHEARD) the link is open for all, or it would carry
        one transfer at a time for as long as answers last; the next failure closes it at once."""
        link = self._links.get(pair)
        if link is None or link.opens_at == -math.inf or link.closed(now):
            return
        if link.trial is not None and link.trial(now) is Trial.UNHEARD:
            link.opens_to_all()
        else:
            link.trial, link.tried_by, link.tried_at = trial, by, now

    def moved(self, pair: Pair, moved: KvMoved | None, now: float) -> bool:
        """A transfer arrived; `moved` is None if it was not measured. Returns whether the link was closed until now."""
        link = self._link(pair)
        was_closed = link.opens_at > -math.inf
        link.failures, link.closed_for = 0, 0.0
        link.opens_to_all()
        if moved is not None and moved.tokens > 0 and moved.seconds > 0:
            if not moved.early_bytes:  # else they waited for the prefill too
                link.s_a_token = _mean(link.s_a_token, moved.moving_s / moved.tokens)
            self._bytes_a_token[pair[0]] = _mean(self._bytes_a_token.get(pair[0]), moved.bytes / moved.tokens)
            moving_s = moved.seconds - moved.waited_s
            self._ports.setdefault(pair[0], _Port()).moved(moved.tokens, moving_s, now)
            received_s = max(0.0, moved.moving_s - moved.waited_s)  # a held sender leaves the receiving port idle
            span_s = min(moved.seconds, moved.span_s) if moved.span_s > 0 else received_s
            received = pair[0], moved.tokens, received_s, span_s, moved.pauses, now
            self._inbound.setdefault(pair[1], _InboundPort()).moved(*received)
        return was_closed

    def failed(self, pair: Pair, by: object, now: float) -> None:
        """The transfer `by` failed. When many are cut at once the first few close the link; the rest, however late they
        are reported, say nothing new: the one that tries the link shows whether it is good now."""
        link = self._link(pair)
        link.failures += 1
        tries = link.trial is not None and link.tried_by is by
        if link.failures >= self._max_failures and (tries or link.opens_at == -math.inf):
            link.closed_for = min(2 * link.closed_for, LONGEST_CLOSED_S) or self._closed_s
            link.opens_at, link.trial, link.tried_by = now + link.closed_for, None, None

    def forget(self, instance_id: str, known: Container[str]) -> None:
        """The instance is gone, and one of the same name starts over. Late reports of others that are not `known` any
        more go with it."""
        ends = {end for pair in self._links for end in pair}
        gone = {end for end in ends if end == instance_id or end not in known}
        self._links = {pair: link for pair, link in self._links.items() if gone.isdisjoint(pair)}
        self._bytes_a_token = {end: size for end, size in self._bytes_a_token.items() if end not in gone}
        self._ports = {end: port for end, port in self._ports.items() if end not in gone}
        self._inbound = {end: port for end, port in self._inbound.items() if end not in gone}

    def usable(self, pair: Pair, now: float) -> bool:
        link = self._links.get(pair)
        return link is None or (link.state is not LinkState.DOWN and not link.closed(now))

    def tried(self, pair: Pair, patience_s: float, now: float) -> bool:
        """Whether it is closed only because a transfer tries it, for no longer than `patience_s`."""
        link = self._links.get(pair)
        if link is None or link.state is LinkState.DOWN or now >= link.tried_at + patience_s:
            return False
        return link.tried(now)

    def down(self, pair: Pair) -> bool:
        """Whether its engine reports it as down."""
        link = self._links.get(pair)
        return link is not None and link.state is LinkState.DOWN

    def move_s(self, pair: Pair, tokens: int) -> float | None:
        """Seconds that the KV of so many tokens takes, as measured; None without a measurement."""
        link = self._links.get(pair)
        if link is None:
            return None
        size = self._bytes_a_token.get(pair[0])
        if link.bandwidth and size is not None:
            return (link.latency or 0.0) + tokens * size / link.bandwidth
        return None if link.s_a_token is None else tokens * link.s_a_token

    def moves(self, source: str, targets: Sequence[str], tokens: int) -> dict[str, float]:
        """The same for each target; a link without a measurement counts as the mean of the others (0 without any)."""
        took = {target: self.move_s((source, target), tokens) for target in targets}
        known = [seconds for seconds in took.values() if seconds is not None]
        mean = sum(known) / len(known) if known else 0.0
        return {target: mean if seconds is None else seconds for target, seconds in took.items()}

    def port_s_a_token(self, source: str) -> float | None:
        """Seconds of the port of this instance for the KV of one token, as this gateway's transfers get it beside those
        of others; None before enough of them were measured."""
        port = self._ports.get(source)
        return None if port is None else port.s_a_token

    def inbound_s_a_token(self, target: str) -> float | None:
        """The same of the port through which this instance receives KV; None before enough transfers of different
        sources met there."""
        port = self._inbound.get(target)
        return None if port is None else port.s_a_token

    def mean_move(self, source: str, targets: Sequence[str]) -> tuple[float, float]:
        """Mean over the measured links to these: seconds of any transfer, and of each token; 0 without any."""
        size = self._bytes_a_token.get(source)
        found = []
        for target in targets:
            link = self._links.get((source, target))
            if link is not None and link.bandwidth and size is not None:
                found.append((link.latency or 0.0, size / link.bandwidth))
            elif link is not None and link.s_a_token is not None:
                found.append((0.0, link.s_a_token))
        if not found:
            return 0.0, 0.0
        return sum(latency for latency, _ in found) / len(found), sum(each for _, each in found) / len(found)

    def views(self, now: float) -> list[LinkView]:
        return [
            LinkView(*pair, link.state, link.closed(now), link.bandwidth, link.latency)
            for pair, link in sorted(self._links.items())
        ]

    def _link(self, pair: Pair) -> _Link:
        return self._links.setdefault(pair, _Link())


def _mean(before: float | None, sample: float) -> float:
    return sample if before is None else before + NEWEST * (sample - before)
