"""Kairos' choice of decodes (Alg. 3), computed incrementally for an engine that calls it before every step of about 30
ms.

A test compares it with the printed algorithm, bit for bit. The decoding sequences are kept in columns, ascending by
length, then id. A step moves only those that ran in it. As these are nearly always the shortest, few overtake another.
The scan ends when only longer sequences remain, which would be rejected for the same reason.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from controller.core.steps import Seq
from controller.policies.batching.base import Grant
from controller.policies.batching.kairos_step_table import KairosProfile, StepTable


class Known(NamedTuple):
    """For one batch size: (mean, count) of the observations by bucket, and the parts of the profile."""

    row: Mapping[int, tuple[float, int]]
    base: float
    slope: float
    fixed: float


class Standing:
    """The decoding sequences of an engine. `prompting`: running sequences that still prefill, in the engine's order."""

    def __init__(self, table: StepTable, profile: KairosProfile) -> None:
        """`table` starts from `profile`."""
        self.prompting: list[Seq] = []
        self._table = table
        self._profile = profile
        self._known: list[Known] = []  # by batch size
        self._running: list[Seq] = []
        self._decoding: set[Seq] = set()
        self._grants: list[Grant] = []
        self._lengths: list[int] = []
        self._outputs: list[int] = []
        self._tpots: list[float] = []
        self._firsts: list[float] = []
        self._chosen: list[Grant] = []
        self._ahead = 0  # how many of the chosen ones are the shortest of all

    def update(self, running: Sequence[Seq]) -> None:
        """Take over the running sequences.

        One that has begun to decode does so until it leaves. `ran` reports progress.
        """
        if self._running != running:
            for seq in self._decoding.difference(running):
                self._remove(seq)
            self.prompting = [seq for seq in running if seq not in self._decoding]
            self._running = list(running)
        begun = [seq for seq in self.prompting if seq.decoding]
        for seq in begun:
            self._insert(seq)
        if begun:
            self.prompting = [seq for seq in self.prompting if seq not in self._decoding]

    def ran(self, decodes: Sequence[Seq], repeats: int) -> None:
        """A step ran this often: each of `decodes` has as many tokens more."""
        chosen, ahead = self._chosen, self._ahead
        if ahead == len(decodes) == len(chosen) and ahead and decodes[0] is chosen[0].seq:
            self._lengths[:ahead] = [length + repeats for length in self._lengths[:ahead]]
            self._outputs[:ahead] = [output + repeats for output in self._outputs[:ahead]]
            while 0 < ahead < len(self._lengths) and self._lengths[ahead - 1] >= self._lengths[ahead]:
                ahead -= 1
                self._move_back(ahead)
            return
        self._lengths = [grant.seq.tokens for grant in self._grants]
        self._outputs = [grant.seq.output_tokens for grant in self._grants]
        self._sort()

    # ---- the choice -----------------------------------------------------------------------------------------------

    def choose(self, now: float, reserve: str, if_needed: bool = False) -> list[Grant]:
        """Alg. 3 on the sequences of `update`: one token for each that decodes in this step, ascending by length.

        `if_needed`: all of them while a step of all keeps the tightest TPOT.
        """
        if not self._grants:
            self._chosen = []
            return []
        known, bucket = self._known_upto(len(self._grants) + 1), self._table.bucket
        if if_needed and self._step_of_all(known) <= min(self._tpots):
            self._ahead, self._chosen = len(self._grants), list(self._grants)
            return self._chosen
        if reserve == "longest":
            least = self._least_recoverable(now, self._step_of_all(known))
        else:
            least = self._least(now, known[len(self._grants) if reserve == "active" else 1])
        joined: list[Grant] = []
        ahead, throughput = -1, 0.0
        count, (row, base, slope, fixed) = 1, known[1]
        for grant, length in zip(self._grants, self._lengths, strict=True):
            at = length // bucket
            entry = row.get(at)
            step = base + slope * length + fixed if entry is None else entry[0]
            if step <= least and count / step > throughput:
                joined.append(grant)
                throughput = count / step
                count += 1
                row, base, slope, fixed = known[count]
                continue
            ahead = len(joined) if ahead < 0 else ahead
            if entry is None and not any(
                each > at and seen[0] <= least and count / seen[0] > throughput for each, seen in row.items()
            ):
                break  # the others are longer, so the profile and the observations reject them too
        self._ahead = ahead if joined and ahead >= 0 else len(self._grants)
        self._chosen = joined or list(self._grants)
        return self._chosen

    def _step_of_all(self, known: Sequence[Known]) -> float:
        row, base, slope, fixed = known[len(self._grants)]
        entry = row.get(self._lengths[-1] // self._table.bucket)
        return base + slope * self._lengths[-1] + fixed if entry is None else entry[0]

    def _known_upto(self, batch: int) -> list[Known]:
        rows = self._table.rows(batch)
        for size in range(len(self._known), batch + 1):
            self._known.append(Known(rows[size], *self._profile.parts(size)))
        return self._known

    def _least(self, now: float, reserved: Known) -> float:
        """The smallest slack (eq. 2)."""
        row, base, slope, fixed = reserved
        columns = zip(self._tpots, self._outputs, self._firsts, self._lengths, strict=True)
        slacks = [
            tpot_s * output - (now - first_at) - (base + slope * length + fixed)
            for tpot_s, output, first_at, length in columns
        ]
        for bucket, (mean, _) in row.items():
            low = bisect_left(self._lengths, bucket * self._table.bucket)
            for at in range(low, bisect_left(self._lengths, (bucket + 1) * self._table.bucket, low)):
                slacks[at] = self._tpots[at] * self._outputs[at] - (now - self._firsts[at]) - mean
        return min(slacks)

    def _least_recoverable(self, now: float, step_s: float) -> float:
        """The smallest slack (eq. 2) with `step_s` reserved, of those that decoding to their end can bring in time; of
        all where none can."""
        slacks, kept = [], []
        columns = zip(self._grants, self._tpots, self._outputs, self._firsts, strict=True)
        for grant, tpot_s, output, first_at in columns:
            slacks.append(tpot_s * output - (now - first_at) - step_s)
            left = grant.seq.max_tokens - output
            if slacks[-1] + max(0.0, tpot_s - step_s) * left >= 0:
                kept.append(slacks[-1])
        return min(kept or slacks)

    # ---- the columns ----------------------------------------------------------------------------------------------

    def _sort(self) -> None:
        """By length, then id, as they are now."""
        keys = [(length, grant.seq.id) for length, grant in zip(self._lengths, self._grants, strict=True)]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        for column in self._columns():
            column[:] = [column[at] for at in order]

    def _move_back(self, at: int) -> None:
        """Move it behind the sequences that it has overtaken; those after it are in order."""
        length, name = self._lengths[at], self._grants[at].seq.id
        to = bisect_left(self._lengths, length, at + 1)
        while to < len(self._lengths) and self._lengths[to] == length and self._grants[to].seq.id < name:
            to += 1
        for column in self._columns():
            column.insert(to - 1, column.pop(at))

    def _columns(self) -> tuple[list[Any], ...]:
        return self._grants, self._lengths, self._outputs, self._tpots, self._firsts

    def _insert(self, seq: Seq) -> None:
        length, first_at = seq.tokens, seq.first_token_at or 0.0
        at = bisect_left(self._grants, (length, seq.id), key=lambda grant: (grant.seq.tokens, grant.seq.id))
        values = Grant(seq, 1), length, seq.output_tokens, seq.tpot_s, first_at
        for column, value in zip(self._columns(), values, strict=True):
            column.insert(at, value)
        self._decoding.add(seq)

    def _remove(self, seq: Seq) -> None:
        at = next(at for at, grant in enumerate(self._grants) if grant.seq is seq)
        for column in self._columns():
            del column[at]
        self._decoding.remove(seq)
