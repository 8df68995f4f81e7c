"""Kairos' choice of decodes for an engine that asks in every step of 30 ms: `kairos_choice.choose`, bit for bit.

A test holds one to the other. What is known of a sequence is kept as columns, ascending by length, then id: who came
and who left is put in and taken out, the rest is sorted again only after somebody overtook. The choice is arithmetic on
whole columns as long as one after the other joins; from the first who is refused on it goes one by one, and ends where
only longer ones follow, which would be refused for the same reason.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from controller.core.steps import Seq
from controller.policies.batching.base import Grant
from controller.policies.batching.kairos_choice import Profile, StepTable

Column = npt.NDArray[np.float64]
PROMPT, OUTPUT, TPOT, FIRST = range(4)


class Parts:
    """A profile's base, slope and fixed seconds by size of the batch."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._known: Column = np.empty((3, 0))

    def upto(self, batch: int) -> Column:
        """Three rows, columns for batches of 0 to at least `batch`."""
        if self._known.shape[1] <= batch:
            self._known = np.array([self._profile.parts(size) for size in range(2 * batch + 64)]).T.copy()
        return self._known


class Standing:
    """The decoding sequences of an engine; `prompting`: those that run and have still to prefill, in its order."""

    def __init__(self, table: StepTable, profile: Profile) -> None:
        """`table` starts from `profile`."""
        self.prompting: list[Seq] = []
        self._table = table
        self._profile = profile
        self._parts = Parts(profile)
        self._running: list[Seq] = []
        self._decoding: set[Seq] = set()
        self._seqs: list[Seq] = []
        self._grants: list[Grant] = []
        self._columns: Column = np.empty((4, 64))
        self._lengths: Column = np.empty(0)

    def update(self, running: Sequence[Seq]) -> None:
        """`running` as they are now; a sequence that has begun to decode does so until it leaves."""
        if self._running != running:
            for seq in self._decoding.difference(running):
                self._remove(seq)
            self.prompting = [seq for seq in running if seq not in self._decoding]
            self._running = list(running)
        self._columns[OUTPUT, : len(self._seqs)] = [seq.output_tokens for seq in self._seqs]
        self._order()
        begun = [seq for seq in self.prompting if seq.decoding]
        for seq in begun:
            self._insert(seq)
        if begun:
            self.prompting = [seq for seq in self.prompting if seq not in self._decoding]

    def choose(self, now: float, reserve: str) -> list[Grant]:
        """Alg. 3 on what `update` saw: a token for each that decodes in this step, ascending by length."""
        count, lengths = len(self._seqs), self._lengths
        if not count:
            return []
        buckets: list[int] = (lengths.astype(np.int64) // self._table.bucket).tolist()
        least = self._least(now, count if reserve == "active" else 1, buckets)
        base, slope, fixed = self._parts.upto(count)[:, 1 : count + 1]
        seconds = base + slope * lengths + fixed
        for at, (row, bucket) in enumerate(zip(self._table.rows(count)[1:], buckets, strict=False)):
            if (entry := row.get(bucket)) is not None:
                seconds[at] = entry[0]
        throughput = np.arange(1.0, count + 1.0) / seconds
        joins = seconds <= least
        joins[1:] &= throughput[1:] > throughput[:-1]
        if joins.all():
            return list(self._grants)
        first = int(joins.argmin())  # the first who is refused
        joined = self._grants[:first]
        joined += self._behind(first, float(throughput[first - 1]) if first else 0.0, least, buckets)
        return joined or list(self._grants)

    def _behind(self, first: int, throughput: float, least: float, buckets: Sequence[int]) -> list[Grant]:
        """Who joins of those from `first` on, when all before it have."""
        count = first + 1
        rows, parts = self._table.rows(len(self._seqs) + 1), self._parts.upto(len(self._seqs) + 1)
        base, slope, fixed = parts[:, count].tolist()
        joined: list[Grant] = []
        for at, length in enumerate(self._lengths[first:].tolist(), first):
            bucket, row = buckets[at], rows[count]
            entry = row.get(bucket)
            step = base + slope * length + fixed if entry is None else entry[0]
            if step <= least and count / step > throughput:
                joined.append(self._grants[at])
                throughput = count / step
                count += 1
                base, slope, fixed = parts[:, count].tolist()
            elif entry is None and not any(
                each > bucket and seen[0] <= least and count / seen[0] > throughput for each, seen in row.items()
            ):
                break  # what follows is longer: the profile refuses it too, and what was observed
        return joined

    def _least(self, now: float, batch: int, buckets: Sequence[int]) -> float:
        """The smallest slack (eq. 2)."""
        base, slope, fixed = self._profile.parts(batch)
        reserved = base + slope * self._lengths + fixed
        for bucket, (mean, _) in self._table.row(batch).items():
            low = bisect_left(buckets, bucket)
            reserved[low : bisect_right(buckets, bucket, low)] = mean
        _, output, tpot_s, first_at = self._columns[:, : len(self._seqs)]
        return float((tpot_s * output - (now - first_at) - reserved).min(initial=math.inf))

    # ---- the columns ----------------------------------------------------------------------------------------------

    def _order(self) -> None:
        """By length, then id, as they are now."""
        lengths = self._measure()
        ahead = lengths[1:] - lengths[:-1]
        if ahead.size and (least := ahead.min()) <= 0:
            seqs = self._seqs
            if least < 0 or any(seqs[at].id > seqs[at + 1].id for at in np.flatnonzero(ahead == 0).tolist()):
                self._sort()

    def _measure(self) -> Column:
        columns = self._columns[:, : len(self._seqs)]
        self._lengths = columns[PROMPT] + columns[OUTPUT]
        return self._lengths

    def _sort(self) -> None:
        keys = [(length, seq.id) for length, seq in zip(self._lengths.tolist(), self._seqs, strict=True)]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        self._seqs = [self._seqs[at] for at in order]
        self._grants = [self._grants[at] for at in order]
        self._columns[:, : len(order)] = self._columns[:, order]
        self._lengths = self._lengths[order]

    def _insert(self, seq: Seq) -> None:
        held, length = len(self._seqs), seq.tokens
        if held == self._columns.shape[1]:
            self._columns = np.concatenate((self._columns, np.empty_like(self._columns)), axis=1)
        low, high = np.searchsorted(self._lengths, length), np.searchsorted(self._lengths, length, "right")
        at = bisect_left(self._seqs, seq.id, int(low), int(high), key=lambda other: other.id)
        self._columns[:, at + 1 : held + 1] = self._columns[:, at:held]
        self._columns[:, at] = seq.prompt_tokens, seq.output_tokens, seq.tpot_s, seq.first_token_at or 0.0
        self._seqs.insert(at, seq)
        self._grants.insert(at, Grant(seq, 1))
        self._decoding.add(seq)
        self._measure()

    def _remove(self, seq: Seq) -> None:
        at, held = self._seqs.index(seq), len(self._seqs)
        self._columns[:, at : held - 1] = self._columns[:, at + 1 : held]
        del self._seqs[at], self._grants[at]
        self._decoding.remove(seq)
