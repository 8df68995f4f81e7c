"""Kairos' choice of decodes for an engine that asks in every step of 30 ms: `kairos_choice.choose`, bit for bit.

A test holds one to the other. What is known of the decoding sequences is kept in columns, ascending by length, then id,
and Alg. 3 asks whole columns: nearly always the shortest join one after the other, and then nobody. A step moves on
only those that ran in it; as these are nearly always the shortest, few ever overtake another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from controller.core.steps import Seq
from controller.policies.batching.base import Grant
from controller.policies.batching.kairos_choice import Means, Profile, StepTable

Column = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]


class Standing:
    """The decoding sequences of an engine; `prompting`: those that run and have still to prefill, in its order."""

    def __init__(self, table: StepTable, profile: Profile) -> None:
        """`table` starts from `profile`."""
        self.prompting: list[Seq] = []
        self._table = table
        self._profile = profile
        self._parts = np.empty((0, 3))  # of the profile, by size of the batch
        self._running: list[Seq] = []
        self._decoding: set[Seq] = set()
        self._grants: list[Grant] = []
        self._columns = np.empty((4, 0))  # lengths, outputs, TPOTs, first token times
        self._chosen: list[Grant] = []
        self._ahead = 0  # so many of the chosen are the shortest that there are

    def update(self, running: Sequence[Seq]) -> None:
        """`running` as they are now; a sequence that has begun to decode does so until it leaves. `ran` tells of their
        progress."""
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
        """A step ran so often: each of `decodes` has as many tokens more."""
        chosen, ahead = self._chosen, self._ahead
        if ahead == len(decodes) == len(chosen) and ahead and decodes[0] is chosen[0].seq:
            self._columns[:2, :ahead] += repeats
            lengths = self._columns[0]
            if ahead < len(lengths) and lengths[ahead - 1] >= lengths[ahead]:
                begin = int(lengths[:ahead].searchsorted(lengths[ahead]))
                self._sort(begin, ahead + int(lengths[ahead:].searchsorted(lengths[ahead - 1], "right")))
            return
        seqs = [grant.seq for grant in self._grants]
        self._columns[0] = [seq.tokens for seq in seqs]
        self._columns[1] = [seq.output_tokens for seq in seqs]
        self._sort(0, len(seqs))

    # ---- the choice -----------------------------------------------------------------------------------------------

    def choose(self, now: float, reserve: str) -> list[Grant]:
        """Alg. 3 on what `update` saw: a token for each that decodes in this step, ascending by length."""
        count = len(self._grants)
        if not count:
            self._chosen = []
            return []
        lengths, outputs, tpots, firsts = self._columns
        means = self._table.means(count + 1, int(lengths[-1]))
        buckets = (lengths // self._table.bucket).astype(np.intp)
        reserved = self._steps(count if reserve == "active" else 1, lengths, buckets, means)
        least = float((tpots * outputs - (now - firsts) - reserved).min())  # eq. 2
        batches = np.arange(1, count + 1)
        steps = self._steps(batches, lengths, buckets, means)
        rates = batches / steps
        joins = steps <= least
        joins[1:] &= rates[1:] > rates[:-1]
        ahead = count if joins.all() else int(joins.argmin())
        joined = self._grants[:ahead]
        if ahead < count:
            joined += self._later(ahead, least, float(rates[ahead - 1]) if ahead else 0.0, lengths, buckets, means)
        self._ahead = ahead if joined else count
        self._chosen = joined or list(self._grants)
        return self._chosen

    def _later(
        self,
        refused: int,
        least: float,
        throughput: float,
        lengths: Column,
        buckets: Index,
        means: Means,
    ) -> list[Grant]:
        """Who joins behind the first that was refused: what was observed may be faster for a longer one."""
        joined: list[Grant] = []
        at, batch = refused + 1, refused + 1
        while at < len(self._grants):
            steps = self._steps(batch, lengths[at:], buckets[at:], means)
            fitting = np.flatnonzero((steps <= least) & (batch / steps > throughput))
            if not fitting.size:
                break
            at += int(fitting[0])
            joined.append(self._grants[at])
            throughput = batch / float(steps[fitting[0]])
            at, batch = at + 1, batch + 1
        return joined

    def _steps(self, batch: int | Index, lengths: Column, buckets: Index, means: Means) -> Column:
        """Seconds of a step of `batch`, of one size or one for each of `lengths`, as `StepTable.seconds` has them."""
        if len(self._parts) < len(means):
            self._parts = np.array([self._profile.parts(size) for size in range(len(means))])
        base, slope, fixed = self._parts[batch].T
        seen = means[batch, buckets]
        seconds: Column = np.where(np.isnan(seen), base + slope * lengths + fixed, seen)
        return seconds

    # ---- the columns ----------------------------------------------------------------------------------------------

    def _sort(self, begin: int, end: int) -> None:
        """By length, then id, as they are now; only those from `begin` up to `end` are out of order."""
        lengths = self._columns[0].tolist()
        order = sorted(range(begin, end), key=lambda at: (lengths[at], self._grants[at].seq.id))
        self._grants[begin:end] = [self._grants[at] for at in order]
        self._columns[:, begin:end] = self._columns[:, order]

    def _insert(self, seq: Seq) -> None:
        length = seq.tokens
        at = bisect_left(self._grants, (length, seq.id), key=lambda grant: (grant.seq.tokens, grant.seq.id))
        values: Any = (length, seq.output_tokens, seq.tpot_s, seq.first_token_at or 0.0)
        self._grants.insert(at, Grant(seq, 1))
        self._columns = np.insert(self._columns, at, values, axis=1)
        self._decoding.add(seq)

    def _remove(self, seq: Seq) -> None:
        at = next(at for at, grant in enumerate(self._grants) if grant.seq is seq)
        del self._grants[at]
        self._columns = np.delete(self._columns, at, axis=1)
        self._decoding.remove(seq)
