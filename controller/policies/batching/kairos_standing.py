"""Kairos' choice of decodes for an engine that asks in every step of 30 ms: `kairos_choice.choose`, bit for bit.

A test holds one to the other. What is known of a sequence is kept as columns, ascending by length, then id: who came
and who left is put in and taken out, the rest is sorted again only after somebody overtook. The choice is arithmetic on
whole columns as long as one after the other joins; from the first who is refused on it goes one by one, and ends where
only longer ones follow, which would be refused for the same reason.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from controller.core.steps import Seq
from controller.policies.batching.base import Grant
from controller.policies.batching.kairos_choice import Profile, StepTable

Column = npt.NDArray[np.float64]
LENGTH, OUTPUT, TPOT, FIRST = range(4)


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


class StepMatrix(StepTable):
    """A StepTable that answers for many at once: what was observed, by size of the batch and bucket; NaN where nothing
    was. Only buckets of which something was observed have a column."""

    def __init__(self, profile: Callable[[int, int], float], bucket: int = 1) -> None:
        super().__init__(profile, bucket)
        self._means: Column = np.full((64, 8), np.nan)
        self._place = np.zeros(64, np.intp)  # by bucket, its column; 0: none was observed, and that column is empty
        self._places = 1

    def observe(self, batch: int, length: int, seconds: float) -> None:
        super().observe(batch, length, seconds)
        bucket = length // self.bucket
        place = int(self._places_upto(bucket)[bucket])
        if not place:
            place = self._place[bucket] = self._places
            self._places += 1
        self._means_upto(batch, place)[batch, place] = self.row(batch)[bucket][0]

    def observed(self, sizes: int | Column, lengths: Column) -> Column:
        """Means by length, of steps of `sizes`, one for all or one for each."""
        buckets = lengths.astype(np.intp) // self.bucket
        places = self._places_upto(int(buckets[-1]))[buckets]  # lengths ascend
        found: Column = self._means_upto(int(np.max(sizes)), 0)[sizes, places]
        return found

    def _places_upto(self, bucket: int) -> npt.NDArray[np.intp]:
        if bucket >= len(self._place):
            self._place = np.concatenate((self._place, np.zeros(2 * bucket, np.intp)))
        return self._place

    def _means_upto(self, size: int, place: int) -> Column:
        sizes, places = self._means.shape
        if size >= sizes or place >= places:
            grown: Column = np.full((max(sizes, 2 * size), max(places, 2 * place)), np.nan)
            grown[:sizes, :places] = self._means
            self._means = grown
        return self._means


class Standing:
    """The decoding sequences of an engine; `prompting`: those that run and have still to prefill, in its order."""

    def __init__(self, table: StepMatrix, profile: Profile) -> None:
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
            self._columns[:TPOT, :ahead] += repeats  # the usual case: who is shorter joined, and all of them ran
            lengths = self._columns[LENGTH]
            if ahead < len(self._seqs) and lengths[ahead - 1] >= lengths[ahead]:
                self._sort()
            return
        columns = self._columns[:, : len(self._seqs)]
        columns[OUTPUT] = [seq.output_tokens for seq in self._seqs]
        columns[LENGTH] = [seq.tokens for seq in self._seqs]
        self._sort()

    def choose(self, now: float, reserve: str) -> list[Grant]:
        """Alg. 3 on what `update` saw: a token for each that decodes in this step, ascending by length."""
        chosen, self._ahead = self._choose(now, reserve) if self._seqs else ([], 0)
        self._chosen = chosen
        return chosen

    def _choose(self, now: float, reserve: str) -> tuple[list[Grant], int]:
        """Also how many of the shortest joined before the first was refused; all, if nobody joined."""
        count = len(self._seqs)
        lengths, sizes = self._columns[LENGTH, :count], np.arange(1, count + 1)
        least = self._least(now, count if reserve == "active" else 1)
        base, slope, fixed = self._parts.upto(count)[:, 1 : count + 1]
        seconds = _filled(base + slope * lengths + fixed, self._table.observed(sizes, lengths))
        throughput = sizes / seconds
        joins = seconds <= least
        joins[1:] &= throughput[1:] > throughput[:-1]
        first = count if joins.all() else int(joins.argmin())  # the first who is refused
        joined = self._grants[:first]
        if first < count:
            joined += self._behind(first, float(throughput[first - 1]) if first else 0.0, least)
        return (joined, first) if joined else (list(self._grants), count)

    def _behind(self, first: int, throughput: float, least: float) -> list[Grant]:
        """Who joins of those from `first` on, when all before it have."""
        count = first + 1
        rows, parts = self._table.rows(len(self._seqs) + 1), self._parts.upto(len(self._seqs) + 1)
        base, slope, fixed = parts[:, count].tolist()
        joined: list[Grant] = []
        for at, length in enumerate(self._columns[LENGTH, first : len(self._seqs)].tolist(), first):
            bucket, row = length // self._table.bucket, rows[count]
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

    def _least(self, now: float, batch: int) -> float:
        """The smallest slack (eq. 2)."""
        base, slope, fixed = self._profile.parts(batch)
        lengths, output, tpot_s, first_at = self._columns[:, : len(self._seqs)]
        reserved = _filled(base + slope * lengths + fixed, self._table.observed(batch, lengths))
        return float((tpot_s * output - (now - first_at) - reserved).min())

    # ---- the columns ----------------------------------------------------------------------------------------------

    def _sort(self) -> None:
        """By length, then id, as they are now."""
        count = len(self._seqs)
        lengths = self._columns[LENGTH, :count].tolist()
        keys = [(length, seq.id) for length, seq in zip(lengths, self._seqs, strict=True)]
        order = sorted(range(count), key=keys.__getitem__)
        self._seqs = [self._seqs[at] for at in order]
        self._grants = [self._grants[at] for at in order]
        self._columns[:, :count] = self._columns[:, order]

    def _insert(self, seq: Seq) -> None:
        held = len(self._seqs)
        if held == self._columns.shape[1]:
            self._columns = np.concatenate((self._columns, np.empty_like(self._columns)), axis=1)
        at = bisect_left(self._seqs, (seq.tokens, seq.id), key=lambda other: (other.tokens, other.id))
        self._columns[:, at + 1 : held + 1] = self._columns[:, at:held]
        self._columns[:, at] = seq.tokens, seq.output_tokens, seq.tpot_s, seq.first_token_at or 0.0
        self._seqs.insert(at, seq)
        self._grants.insert(at, Grant(seq, 1))
        self._decoding.add(seq)

    def _remove(self, seq: Seq) -> None:
        at, held = self._seqs.index(seq), len(self._seqs)
        self._columns[:, at : held - 1] = self._columns[:, at + 1 : held]
        del self._seqs[at], self._grants[at]
        self._decoding.remove(seq)


def _filled(profiled: Column, observed: Column) -> Column:
    """What was observed, else the profile's."""
    np.copyto(profiled, observed, where=observed == observed)  # noqa: PLR0124 (NaN differs from itself)
    return profiled
