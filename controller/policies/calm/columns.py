"""CALM's data of every sequence as columns, one numpy row each, so that thousands are weighed within a millisecond.

A row is filled when its sequence joins, and again when it has made progress. For a sequence without an Estimate the
length is `max_tokens`, the deadline its last token's target time, and the goodput its remaining tokens times `value`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from controller.core.steps import Seq

Column = np.ndarray
LEAST_S = 1e-9  # least generation time: a sequence about to end must not divide by zero
FIRST_ROWS = 256
SURE = 1.2816  # standard deviations from the middle beyond which one of ten lies: lower bounds are so far below it
LOGISTIC = 1.702  # times z: the logistic function is then within 0.01 of the normal distribution, without an erf


class Pace(NamedTuple):
    """Measured pace: seconds per token of a sequence in the running batch, seconds per prompt token (of all, or by
    row), how many sequences a prompt token delays, and the fastest seconds per token.
    """

    token_s: float
    prefill_s: float | Column
    crowd: float
    fast_s: float


class Standings(NamedTuple):
    """The parts of eq. 4.1 by row (or in the order asked for).

    `slack`: seconds to spare; negative: the targets cannot be met. `bandwidth`: share of a slot needed to meet them.
    """

    priority: Column
    goodput: Column
    generation_s: Column
    slack: Column
    bandwidth: Column


def margin_goodput(goodput: Column, generation_s: Column, waited: Column | float = 0.0, bonus: float = 0.0) -> Column:
    """Eq. 4.1 with the starvation term: goodput per second; higher goes first."""
    found: Column = (goodput + bonus * waited) / np.maximum(generation_s, LEAST_S)
    return found


class Columns:
    """Rows by sequence. Freed rows are reused; `alive` marks the rows in use."""

    FLOATS = (
        "prompt", "held", "left", "least", "fewest", "shortest", "prefill", "produced", "goodput", "due", "pace",
        "latest", "likely_latest", "last", "since", "later_output", "later_prompt", "back",
    )  # fmt: skip

    def __init__(self) -> None:
        self.rows: dict[Seq, int] = {}
        self.hopeless: dict[
            Seq, float
        ] = {}  # sequences past their last moment, which have no rows, with the seconds they would still take
        self.seqs: list[Seq | None] = []
        self._free: list[int] = []
        self._groups: dict[str, list[int]] = {}  # by program: its number and its open calls
        self._free_groups: list[int] = []
        self._most_groups = 0
        self._size = 0
        self._grow(FIRST_ROWS)

    def _grow(self, size: int) -> None:
        for name in self.FLOATS:
            column = np.zeros(size)
            if self._size:
                column[: self._size] = getattr(self, name)
            setattr(self, name, column)
        for name, kind in (("each", bool), ("adds", bool), ("alive", bool), ("group", np.intp)):
            column = np.zeros(size, kind)
            if self._size:
                column[: self._size] = getattr(self, name)
            setattr(self, name, column)
        self.seqs.extend([None] * (size - self._size))
        self._free.extend(range(size - 1, self._size - 1, -1))
        self._size = size

    prompt: Column
    held: Column  # tokens in the KV cache
    left: Column  # tokens to generate, at most
    least: Column  # least tokens to generate, by the lowest bound so far: one high estimate must not lose a program
    fewest: Column  # least tokens to generate, by the lower bound as it is now
    shortest: Column  # the lowest bound so far for the whole answer
    prefill: Column  # prompt (or recomputed) tokens before the next one
    produced: Column
    goodput: Column
    due: Column  # of the first token
    pace: Column  # target seconds a token
    latest: Column
    likely_latest: Column
    last: Column  # time: when its last token is due, or `latest`
    since: Column  # frame in which it last ran
    later_output: Column  # of its program's later stages
    later_prompt: Column
    back: Column  # seconds to copy its KV back from host memory before it runs
    each: Column
    adds: Column
    alive: Column
    group: Column

    def add(self, seq: Seq, frame: int) -> None:
        if not self._free:
            self._grow(2 * self._size)
        row = self._free.pop()
        self.rows[seq], self.seqs[row] = row, seq
        estimate = seq.estimate
        name = estimate.program if estimate is not None and estimate.program else f"\0{row}"
        self.group[row] = self._join(name)
        self.alive[row], self.since[row] = True, frame
        self.prompt[row], self.due[row], self.pace[row] = seq.prompt_tokens, seq.due, seq.tpot_s
        if estimate is None:
            self.last[row] = self.latest[row] = self.likely_latest[row] = _promised(seq)
            self.each[row] = self.adds[row] = False
        else:
            self.each[row], self.goodput[row] = estimate.each_token, estimate.goodput
            self.adds[row] = estimate.adds
            self.last[row] = estimate.latest
            self.latest[row] = math.inf if estimate.each_token else estimate.latest
            self.likely_latest[row] = min(self.latest[row], estimate.likely_latest)
            self.later_output[row], self.later_prompt[row] = estimate.later_output, estimate.later_prompt
        self.shortest[row] = 0.0
        self.refresh((seq,))

    def _join(self, name: str) -> int:
        known = self._groups.get(name)
        if known is None:
            if self._free_groups:
                number = self._free_groups.pop()
            else:
                number, self._most_groups = self._most_groups, self._most_groups + 1
            known = self._groups[name] = [number, 0]
        known[1] += 1
        return known[0]

    @property
    def alone(self) -> bool:
        """Whether each sequence is a program of its own, so that nothing is to be added up."""
        return len(self._groups) == len(self.rows)

    def knows(self, seq: Seq) -> bool:
        return seq in self.rows or seq in self.hopeless

    def give_up(self, found: Standings, now: float) -> list[int]:
        """Remove the rows of sequences that cannot meet their targets and whose last moment has passed; returns
        these.
        """
        over: list[int] = np.flatnonzero(self.alive & (found.slack < 0) & (self.last < now)).tolist()
        for row in over:
            if (seq := self.seqs[row]) is not None:
                self.drop(seq)
                self.hopeless[seq] = float(found.generation_s[row])
        return over

    def drop(self, seq: Seq) -> None:
        self.hopeless.pop(seq, None)
        row = self.rows.pop(seq, None)
        if row is None:
            return
        self.seqs[row] = None
        self.alive[row] = False
        estimate = seq.estimate
        name = estimate.program if estimate is not None and estimate.program else f"\0{row}"
        known = self._groups[name]
        known[1] -= 1
        if not known[1]:
            self._free_groups.append(self._groups.pop(name)[0])
        self._free.append(row)

    def shrink(self) -> None:
        """Give back the rows of a burst: each weighing costs as much as all rows, in use or not."""
        if self._size <= FIRST_ROWS or 4 * len(self.rows) >= self._size:
            return
        known = [(seq, int(self.since[row])) for seq, row in self.rows.items()]
        hopeless = self.hopeless
        self.__init__()  # type: ignore[misc]
        self.hopeless = hopeless
        for seq, since in known:
            self.add(seq, since)

    def refresh(self, seqs: Iterable[Seq]) -> None:
        """Update the rows of these sequences after progress."""
        for seq in seqs:
            row = self.rows[seq]
            produced = seq.output_tokens
            estimate = seq.estimate
            upper = seq.max_tokens if estimate is None else estimate.length.upper(produced)
            least = upper if estimate is None else estimate.length.lower(produced)
            left = max(1, upper - produced)
            if self.shortest[row] <= produced or least < self.shortest[row]:
                self.shortest[row] = least
            self.least[row] = max(1.0, self.shortest[row] - produced)
            self.fewest[row] = max(1, least - produced)
            needed = seq.prompt_tokens + produced - max(seq.computed, seq.swapped)
            self.back[row] = seq.back_s
            self.left[row], self.produced[row], self.held[row] = left, produced, seq.computed
            self.prefill[row] = 0 if produced and needed == 1 else needed
            if estimate is None:
                self.goodput[row] = left * seq.value

    def ran(self, seqs: Iterable[Seq], frame: int) -> None:
        self.since[[self.rows[seq] for seq in seqs if seq in self.rows]] = frame

    def synchronise(self, seqs: Sequence[Seq], frame: int) -> None:
        """Make the rows match exactly these sequences.

        Compares only counts and ends if none joined or left unnoticed.
        """
        known = len(self.rows) + len(self.hopeless)
        if len(seqs) == known and (not seqs or (self.knows(seqs[0]) and self.knows(seqs[-1]))):
            return
        for seq in {*self.rows, *self.hopeless}.difference(seqs):
            self.drop(seq)
        for seq in seqs:
            if not self.knows(seq):
                self.add(seq, frame)

    def weigh(self, now: float, frame: int, pace: Pace, starvation: float, by_chance: bool = False) -> Standings:
        """Weigh all rows at once; unused rows get priority -1.

        `by_chance`: goodput counts times the chance that it is earned, and the work of answers is the likely one.

        Work is charged in slot-seconds: a token occupies one slot for `token_s`, and a prompt token delays all running
        sequences. Slack is measured to the likely end (the geometric mean of both bounds); targets count as lost only
        if even the lower bound is too late. Calls of one program share their priority, and are lost together.
        """
        alive = self.alive
        prompt_s = self._prompt_s(pace)
        elapsed = self.left * pace.token_s + prompt_s
        likely = np.sqrt(self.left * self.least) * pace.token_s + prompt_s
        behind = self._behind(now, pace)
        kept = self._on_time(behind, pace)
        lost = self._lost(now, pace, kept)
        slack = np.where(self.each, -behind, self.likely_latest - now - likely)
        slack = np.where(lost, np.minimum(slack, 0.0) - LEAST_S, np.maximum(slack, 0.0))
        goodput = np.where(self.each, kept, self._of_programs())
        tokens = self.left
        if by_chance:
            tokens = np.sqrt(self.left * self.fewest)
            goodput = goodput * self._chance(now, pace, tokens)
        work = self._work(pace, tokens)
        priority = margin_goodput(goodput, work, np.maximum(0.0, frame - self.since), starvation)
        priority[~alive] = -1.0
        with np.errstate(divide="ignore", invalid="ignore"):
            needed = likely / np.maximum(self.likely_latest - now, LEAST_S)
            bandwidth = np.where(self.each, pace.token_s / self.pace, needed)
        bandwidth[~alive] = 0.0
        if not self.alone:
            most = np.zeros(max(1, self._most_groups))
            np.maximum.at(most, self.group, bandwidth)
            bandwidth = np.where(most[self.group] > 1.0, np.maximum(bandwidth, most[self.group]), bandwidth)
        return Standings(priority, goodput, elapsed, slack, bandwidth)

    def _of_programs(self) -> Column:
        """Goodput of the sequences' programs, as far as their open calls say it."""
        if self.alone:
            return self.goodput
        own = np.where(self.alive & self.adds, self.goodput, 0.0)
        summed: Column = np.bincount(self.group, own, max(1, self._most_groups))[self.group]
        return np.where(self.adds, summed, self.goodput)

    def _chance(self, now: float, pace: Pace, tokens: Column) -> Column:
        """That a sequence and its program's later stages end in time if it runs from now on, 0 to 1.

        The bounds tell how sure the middle is: one answer of ten is shorter than the lower one, and the later stages of
        one program of ten take less than from `latest`. Both errors are taken as normal and independent. Of the calls
        of a program the least chance counts. Tokens that are paced are earned one by one: their chance is 1.
        """
        own_s = (tokens - self.fewest) * pace.token_s
        with np.errstate(invalid="ignore", over="ignore"):
            spread_s = np.hypot(own_s, self.latest - self.likely_latest)
            spare_s = self.likely_latest - now - self._prompt_s(pace) - tokens * pace.token_s
            chance = 1.0 / (1.0 + np.exp(-LOGISTIC * SURE * spare_s / np.maximum(spread_s, LEAST_S)))
        chance = np.where(self.each | ~self.alive | np.isnan(chance), 1.0, chance)
        if self.alone:
            return chance
        least = np.ones(max(1, self._most_groups))
        np.minimum.at(least, self.group, chance)
        of_program: Column = least[self.group]
        return of_program

    def _work(self, pace: Pace, tokens: Column) -> Column:
        """Slot-seconds until the goodput is earned: of all open calls of its program, with so many `tokens` each to
        come, and of its later stages.
        """
        crowd = max(1.0, pace.crowd)
        stall_s = pace.prefill_s * crowd
        own = np.where(self.alive, tokens * pace.token_s + self.prefill * stall_s + self.back * crowd, 0.0)
        stage = own if self.alone else np.bincount(self.group, own, max(1, self._most_groups))[self.group]
        work: Column = stage + self.later_output * pace.token_s + self.later_prompt * stall_s
        return work

    def _prompt_s(self, pace: Pace) -> Column:
        """Seconds before its next token can be computed."""
        found: Column = self.prefill * pace.prefill_s + self.back
        return found

    def _lost(self, now: float, pace: Pace, kept: Column) -> Column:
        """Sequences that cannot meet their targets even alone and at their shortest.

        One such call loses its program.
        """
        prompt_s = self._prompt_s(pace)
        first_late = (self.produced == 0) & (now + prompt_s > self.due)
        late = first_late | (now + self.least * pace.fast_s + prompt_s > self.latest)
        lost: Column = np.where(self.each, kept < 1.0, late) & self.alive
        if self.alone:
            return lost
        found: Column = (np.bincount(self.group, lost, max(1, self._most_groups)) > 0)[self.group]
        return found

    def _behind(self, now: float, pace: Pace) -> Column:
        """Seconds by which the next token will be late if the sequence runs from now on (negative: early)."""
        next_at = now + pace.token_s + self._prompt_s(pace)
        with np.errstate(invalid="ignore"):
            paced = np.where(self.produced > 0, self.produced * self.pace, 0.0)
        return np.asarray(next_at - self.due - paced)

    def _on_time(self, behind: Column, pace: Pace) -> Column:
        """How many of the remaining tokens would still be in time if the sequence ran from now on."""
        gain = self.pace - pace.token_s  # caught up with each token
        with np.errstate(divide="ignore", invalid="ignore"):
            lost = np.ceil(np.maximum(0.0, behind) / gain)
            kept = np.where(gain > 0, self.left - np.where(np.isnan(lost), 0.0, lost), np.floor(behind / gain) + 1.0)
        kept = np.where((gain <= 0) & (behind > 0), 0.0, kept)
        found: Column = np.clip(np.nan_to_num(kept, nan=0.0, posinf=np.inf, neginf=0.0), 0.0, self.left)
        return found


def _promised(seq: Seq) -> float:
    """When the last token is due."""
    return seq.due + (seq.max_tokens - 1) * seq.tpot_s if seq.max_tokens > 1 else seq.due
