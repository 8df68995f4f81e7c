"""Kairos' choice of decodes (Alg. 3), for an engine that asks in every step of 30 ms.

`choose` is the algorithm. `Standing` gives the same answer bit for bit (a test holds one to the other) for less the
more sequences there are: who is there is compared, not asked again; their order is kept while nobody overtakes; the
profile is written out; and the scan ends where only longer ones follow, which would be refused for the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from controller.core.steps import Seq
from controller.policies.batching.base import Grant

PROFILED_RUNS = 100
NOTHING: Mapping[int, tuple[float, int]] = {}


class Profile(Protocol):
    def parts(self, batch: int) -> tuple[float, float, float]:
        """base, slope, fixed: a step of `batch` takes base + slope x longest + fixed seconds, added in this order; the
        slope is not negative."""
        ...


class Known(NamedTuple):
    """Of one size of batch: (mean, count) by bucket of what was observed, and the profile's parts."""

    row: Mapping[int, tuple[float, int]]
    base: float
    slope: float
    fixed: float


class StepTable:
    """Mean step seconds by (batch, length). What was never observed is the profile's."""

    def __init__(self, profile: Callable[[int, int], float], bucket: int = 1) -> None:
        self.profile = profile
        self.bucket = bucket
        self._rows: dict[int, dict[int, tuple[float, int]]] = {}
        self._known: list[Known] = []

    def known(self, profile: Profile, batch: int) -> list[Known]:
        """By size of the batch, to `batch` at least; the table's own list."""
        for size in range(len(self._known), batch + 1):
            self._known.append(Known(self._rows.setdefault(size, {}), *profile.parts(size)))
        return self._known

    def row(self, batch: int) -> Mapping[int, tuple[float, int]]:
        """(mean, count) by bucket of what was observed of steps of `batch`."""
        return self._rows.get(batch, NOTHING)

    def seconds(self, batch: int, length: int) -> float:
        entry = self.row(batch).get(length // self.bucket)
        return entry[0] if entry is not None else self.profile(batch, length)

    def observe(self, batch: int, length: int, seconds: float) -> None:
        """One more sample of a step of `batch` sequences, the longest of `length` tokens."""
        row, key = self._rows.setdefault(batch, {}), length // self.bucket
        mean, count = row.get(key, (self.profile(batch, length), PROFILED_RUNS))
        row[key] = (mean + (seconds - mean) / (count + 1), count + 1)


class Active(NamedTuple):
    """A decoding sequence: `generated` decode tokens since the one that prefill gave. Order: by length, then id."""

    length: int
    id: str
    first_token_at: float
    generated: int
    tpot_s: float


def slack(active: Active, reserved_s: float, now: float) -> float:
    """Eq. 2, seconds."""
    return active.tpot_s * (active.generated + 1) - (now - active.first_token_at) - reserved_s


def choose(actives: Sequence[Active], table: StepTable, now: float, reserve: str = "active") -> list[Active]:
    """Alg. 3: who decodes in this step, ascending by length. Never empty while anybody is active."""
    ordered = sorted(actives)
    batch = len(ordered) if reserve == "active" else 1
    least = min((slack(each, table.seconds(batch, each.length), now) for each in ordered), default=math.inf)
    joined: list[Active] = []
    throughput = 0.0
    for each in ordered:
        step = table.seconds(len(joined) + 1, each.length)
        if step <= least and (len(joined) + 1) / step > throughput:
            joined.append(each)
            throughput = len(joined) / step
    return joined or ordered


class Standing:
    """The decoding sequences of an engine, ascending by length, then id; columns of what the choice needs of them."""

    def __init__(self) -> None:
        self.prompting = True  # somebody who runs has still to prefill
        self._running: list[Seq] = []
        self._seqs: Sequence[Seq] = ()
        self._prompts: Sequence[int] = ()
        self._firsts: Sequence[float] = ()
        self._tpots: Sequence[float] = ()
        self._outputs: Sequence[int] = ()
        self._ids: Sequence[str] = ()
        self._lengths: Sequence[int] = ()

    def update(self, running: Sequence[Seq]) -> None:
        """`running` as they are now; a sequence that has begun to decode does so until it leaves."""
        if self.prompting or self._running != running:
            self._running = list(running)
            self._sort(running)
            self.prompting = len(self._seqs) < len(self._running)
            return
        self._outputs = [seq.output_tokens for seq in self._seqs]
        self._lengths = [prompt + output for prompt, output in zip(self._prompts, self._outputs, strict=True)]
        keys = list(zip(self._lengths, self._ids, strict=True))
        if keys != sorted(keys):
            self._sort(self._seqs)

    def _sort(self, seqs: Sequence[Seq]) -> None:
        rows = [
            (length, seq.id, output, seq.prompt_tokens, seq.tpot_s, seq.first_token_at or 0.0, seq)
            for seq in seqs
            if (output := seq.output_tokens) and (length := seq.prompt_tokens + output) - seq.computed == 1  # decoding
        ]
        rows.sort()  # ids are unique: nothing after them is compared
        columns = zip(*rows, strict=True) if rows else ((),) * 7
        self._lengths, self._ids, self._outputs, self._prompts, self._tpots, self._firsts, self._seqs = columns

    def choose(self, table: StepTable, profile: Profile, now: float, reserve: str) -> list[Grant]:
        """As `choose`, where `table` starts from `profile`."""
        lengths = self._lengths
        buckets = [length // table.bucket for length in lengths]
        least = self._least(table, profile, now, len(lengths) if reserve == "active" else 1, buckets)
        joined: list[Seq] = []
        count, throughput = 1, 0.0
        known = table.known(profile, len(lengths) + 1)
        row, base, slope, fixed = known[1]
        for at, length, seq in zip(buckets, lengths, self._seqs, strict=True):
            entry = row.get(at)
            step = base + slope * length + fixed if entry is None else entry[0]
            if step <= least and count / step > throughput:
                joined.append(seq)
                throughput = count / step
                count += 1
                row, base, slope, fixed = known[count]
            elif entry is None and not any(
                bucket > at and seen[0] <= least and count / seen[0] > throughput for bucket, seen in row.items()
            ):
                break  # what follows is longer: the profile refuses it too, and what was observed
        return [Grant(seq, 1) for seq in joined or self._seqs]

    def _least(self, table: StepTable, profile: Profile, now: float, batch: int, buckets: Sequence[int]) -> float:
        """The smallest slack (eq. 2)."""
        base, slope, fixed = profile.parts(batch)
        columns = zip(self._tpots, self._outputs, self._firsts, self._lengths, strict=True)
        if not (row := table.row(batch)):
            return min(
                [
                    tpot_s * output - (now - first_at) - (base + slope * length + fixed)
                    for tpot_s, output, first_at, length in columns
                ],
                default=math.inf,
            )
        least = math.inf
        for at, (tpot_s, output, first_at, length) in zip(buckets, columns, strict=True):
            entry = row.get(at)
            reserved_s = base + slope * length + fixed if entry is None else entry[0]
            left = tpot_s * output - (now - first_at) - reserved_s
            if left < least:  # noqa: PLR1730 (a call for each sequence and step costs more than the rest)
                least = left
        return least
