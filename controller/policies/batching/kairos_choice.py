"""Kairos' choice of decodes (Alg. 3), for an engine that asks in every step of 30 ms.

`choose` is the algorithm. `Standing` gives the same answer bit for bit (a test holds one to the other) at about half
the cost: what a step cannot change is kept from one step to the next. While all advance together nobody overtakes, so
the order is kept too; who is there is compared, not asked again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from controller.core.steps import Seq
from controller.policies.batching.base import Grant

PROFILED_RUNS = 100
NOTHING: Mapping[int, tuple[float, int]] = {}


class StepTable:
    """Mean step seconds by (batch, length). What was never observed is the profile's."""

    def __init__(self, profile: Callable[[int, int], float], bucket: int = 1) -> None:
        self.profile = profile
        self.bucket = bucket
        self.rows: dict[int, dict[int, tuple[float, int]]] = {}

    def row(self, batch: int) -> Mapping[int, tuple[float, int]]:
        """(mean, count) by bucket of what was observed of steps of `batch`."""
        return self.rows.get(batch, NOTHING)

    def seconds(self, batch: int, length: int) -> float:
        entry = self.row(batch).get(length // self.bucket)
        return entry[0] if entry is not None else self.profile(batch, length)

    def observe(self, batch: int, length: int, seconds: float) -> None:
        """One more sample of a step of `batch` sequences, the longest of `length` tokens."""
        row, key = self.rows.setdefault(batch, {}), length // self.bucket
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
        self._seqs: list[Seq] = []
        self._grants: list[Grant] = []
        self._prompts: list[int] = []
        self._firsts: list[float] = []
        self._tpots: list[float] = []
        self._outputs: list[int] = []
        self._lengths: list[int] = []

    def update(self, running: Sequence[Seq]) -> None:
        """`running` as they are now; a sequence that has begun to decode does so until it leaves."""
        if self.prompting or self._running != running:
            self._running = list(running)
            self._seqs = [seq for seq in running if seq.decoding]
            self.prompting = len(self._seqs) < len(self._running)
            self._sort()
            return
        outputs, before = [seq.output_tokens for seq in self._seqs], self._outputs
        if not outputs:
            return
        ahead = outputs[0] - before[0]
        if outputs == [output + ahead for output in before]:
            self._outputs = outputs
            self._lengths = [length + ahead for length in self._lengths]
        else:
            self._sort()

    def _sort(self) -> None:
        rows = sorted((seq.prompt_tokens + seq.output_tokens, seq.id, at) for at, seq in enumerate(self._seqs))
        seqs = self._seqs = [self._seqs[at] for _, _, at in rows]
        self._lengths = [length for length, _, _ in rows]
        self._grants = [Grant(seq, 1) for seq in seqs]
        self._firsts = [seq.first_token_at or 0.0 for seq in seqs]
        self._tpots = [seq.tpot_s for seq in seqs]
        self._outputs = [seq.output_tokens for seq in seqs]

    def choose(self, table: StepTable, now: float, reserve: str) -> list[Grant]:
        """As `choose`, with its look-ups (StepTable.seconds) and eq. 2 (slack) written out."""
        lengths, bucket, profile, rows = self._lengths, table.bucket, table.profile, table.rows
        buckets = [length // bucket for length in lengths]
        batch, least = len(lengths) if reserve == "active" else 1, math.inf
        row = rows.get(batch, NOTHING)
        for at, length, output, tpot_s, first_at in zip(
            buckets, lengths, self._outputs, self._tpots, self._firsts, strict=True
        ):
            entry = row.get(at)
            left = tpot_s * output - (now - first_at) - (profile(batch, length) if entry is None else entry[0])
            if left < least:  # noqa: PLR1730 (a call for each sequence and step costs more than the rest)
                least = left
        joined: list[int] = []
        count, throughput = 1, 0.0
        for index, at in enumerate(buckets):
            entry = rows.get(count, NOTHING).get(at)
            step = profile(count, lengths[index]) if entry is None else entry[0]
            if step <= least and count / step > throughput:
                joined.append(index)
                throughput = count / step
                count += 1
        grants = self._grants
        return [grants[index] for index in joined] if 0 < len(joined) < len(grants) else grants.copy()
