"""Batching by rank with preemption at every iteration: shared by LTR, Autellix, EDF and SJF.

The `slots` sequences of smallest key run. With `preempt`, a sequence loses its slot as soon as one with a smaller key
has none; otherwise slots are refilled only when they become free. A sequence that loses its slot keeps its KV until
blocks run out; then the largest key is evicted and computed again. A step contains decodes, started prefills, then
queued ones.

Keys of waiting sequences change only by promotion (against starvation), and those of running ones only when
`next_change` says so. So the steps in between can be run as one. Cost: O(slots) per step, O(log n) for each that joins
or leaves.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.core.steps import Aborted, Added, EngineEvent, Seq, SeqState, StepRan
from controller.policies.batching.base import EngineView, Grant
from controller.policies.batching.filling import grant

Key = tuple[float, ...]
Entry = tuple[Key, float, str, Seq]
NEVER = 1 << 30  # steps


@dataclass(frozen=True, slots=True)
class RankConfig:
    """Settings of orders that have no others."""

    slots: int = 64
    preempt: bool = True


class Ranked:
    """Subclasses define `key`, and may learn in `served`."""

    name: ClassVar[str]
    reorders: ClassVar[bool] = True

    def __init__(self, slots: int, preempt: bool) -> None:
        if slots < 1:
            raise ConfigError("slots must be at least 1", field="slots")
        self.slots = slots
        self.preempt = preempt
        self.step = 0
        self._entries: dict[Seq, Entry] = {}  # of all sequences
        self._queue: list[Entry] = []  # of sequences without a slot, smallest first
        self._ran: dict[Seq, None] = {}
        self._fresh: dict[Seq, None] = {}  # joined during the running step: they wait from its end on
        self._since: dict[Seq, int] = {}  # step since which a sequence without a slot waits
        self._promotions: list[tuple[int, float, str, int, Seq]] = []  # heap of (when, arrival, id, waiting since)
        self._stays = 1

    # ---- what a rank is -------------------------------------------------------------------------------------------

    def key(self, seq: Seq) -> Key:
        raise NotImplementedError

    def served(self, seq: Seq, steps: int) -> bool:
        """The sequence ran this often. True if its key has changed."""
        return False

    def next_change(self, seq: Seq) -> int:
        """Steps of running after which its key may change."""
        return NEVER

    def promoted_after(self, seq: Seq) -> int:
        """Steps of waiting after which `promote` is called."""
        return NEVER

    def promote(self, seq: Seq) -> None:
        """It has waited too long: `key` should be smaller from now on."""

    def gone(self, seq: Seq) -> None:
        """The sequence ended."""

    # ---- the step -------------------------------------------------------------------------------------------------

    def compose(self, engine: EngineView, now: float) -> list[Grant]:
        running = list(engine.running)
        seqs = [*running, *engine.waiting()]
        self._synchronise(seqs)
        contested = len(seqs) > self.slots
        batch = self._batch() if contested else seqs
        grants = self._granted(engine, batch, running)
        self._stays = self._unchanged([grant.seq for grant in grants])
        return grants

    def _batch(self) -> list[Seq]:
        """Smallest keys first among those without a slot, where the order matters."""
        room = self.slots - len(self._ran)
        if not self.preempt or not self._ran:
            return [*self._ran, *(entry[3] for entry in self._queue[: max(0, room)])]
        taken = [*self._ran, *(entry[3] for entry in self._queue[:room])] if room > 0 else list(self._ran)
        rest = self._queue[max(0, room) : max(0, room) + self.slots]
        worst = max(self._entries[seq][:3] for seq in taken)
        if not rest or rest[0][:3] >= worst:
            return taken
        merged = sorted([*(self._entries[seq] for seq in taken), *rest], key=lambda entry: entry[:3])
        return [entry[3] for entry in merged[: self.slots]]

    def _granted(self, engine: EngineView, batch: Sequence[Seq], running: Sequence[Seq]) -> list[Grant]:
        admitted = set(running)
        seated = [seq for seq in batch if seq in admitted]
        # All seats that the batch does not use; `spare` clears them.
        queued = [seq for seq in batch if seq not in admitted][: max(0, engine.max_num_seqs - len(seated))]
        if len(seated) + len(queued) < min(len(batch), self.slots):  # no seat for a queued one, so others go on
            left_out = sorted(admitted.difference(seated), key=lambda seq: self._entries[seq][:3])
            seated += left_out[: self.slots - len(seated) - len(queued)]
        return grant(engine, seated, queued)

    def _unchanged(self, batch: Sequence[Seq]) -> int:
        """Steps until a key may change. With free slots, sequences may join at any time, as blocks allow."""
        if len(batch) < self.slots and len(batch) < len(self._entries):
            return 1
        until = min((self.next_change(seq) for seq in batch), default=NEVER)
        until = min(until, *(self.promoted_after(seq) for seq in self._fresh), NEVER)
        while self._promotions and self._stale(self._promotions[0]):
            heapq.heappop(self._promotions)
        if self._promotions:
            until = min(until, self._promotions[0][0] - self.step)
        if self._ran:
            seated = set(batch)
            until = min(until, *(self.promoted_after(seq) for seq in self._ran if seq not in seated), NEVER)
        return max(1, until)

    def stays(self) -> int:
        return self._stays

    def spare(self, running: Sequence[Seq], wanted: Collection[Seq]) -> Seq | None:
        """The one with the largest key."""
        paused = [self._entries[seq] for seq in running if seq not in wanted and seq in self._entries]
        return max(paused, key=lambda entry: entry[:3])[3] if paused else None

    # ---- who is there ---------------------------------------------------------------------------------------------

    def observe(self, event: EngineEvent, now: float) -> None:
        if isinstance(event, Added) and event.seq.state is not SeqState.FINISHED:
            self._enter(event.seq)
        elif isinstance(event, Aborted):
            self._forget(event.seq)
        elif isinstance(event, StepRan):
            self._observe_step(event)

    def _observe_step(self, event: StepRan) -> None:
        seqs = [*event.step.decodes, *(chunk.seq for chunk in event.step.chunks)]
        before, self._ran = self._ran, dict.fromkeys(seqs)
        for seq in before:
            if seq not in self._ran and seq in self._entries:
                self._wait(seq)
        self.step += event.repeats
        for seq in seqs:
            if seq not in self._entries:
                self._entries[seq] = self._entry(seq)
            elif seq not in before:
                self._leave_queue(seq)
            if self.served(seq, event.repeats):
                self._entries[seq] = self._entry(seq)
            if seq.finish is not None:
                self._forget(seq)
        for seq in self._fresh:
            if seq in self._entries and seq not in self._ran:
                self._count_waiting(seq)
        self._fresh.clear()
        self._promote_due()

    def _promote_due(self) -> None:
        while self._promotions and (self._promotions[0][0] <= self.step or self._stale(self._promotions[0])):
            first = heapq.heappop(self._promotions)
            seq = first[4]
            if not self._stale(first):
                self._leave_queue(seq)
                self.promote(seq)
                self._entries[seq] = self._entry(seq)
                insort(self._queue, self._entries[seq], key=_order)

    def _stale(self, promotion: tuple[int, float, str, int, Seq]) -> bool:
        return self._since.get(promotion[4]) != promotion[3]

    def _entry(self, seq: Seq) -> Entry:
        return (self.key(seq), seq.arrival, seq.id, seq)

    def _enter(self, seq: Seq) -> None:
        self._entries[seq] = self._entry(seq)
        insort(self._queue, self._entries[seq], key=_order)
        self._fresh[seq] = None

    def _wait(self, seq: Seq) -> None:
        insort(self._queue, self._entries[seq], key=_order)
        self._count_waiting(seq)

    def _count_waiting(self, seq: Seq) -> None:
        self._since[seq] = self.step
        after = self.promoted_after(seq)
        if after < NEVER:
            heapq.heappush(self._promotions, (self.step + after, seq.arrival, seq.id, self.step, seq))

    def _leave_queue(self, seq: Seq) -> None:
        entry = self._entries[seq]
        index = bisect_left(self._queue, entry[:3], key=_order)
        if index < len(self._queue) and self._queue[index][3] is seq:
            del self._queue[index]
        self._since.pop(seq, None)

    def _forget(self, seq: Seq) -> None:
        if seq in self._entries:
            self._leave_queue(seq)
            del self._entries[seq]
            self._ran.pop(seq, None)
            self._fresh.pop(seq, None)
            self.gone(seq)

    def _synchronise(self, seqs: Sequence[Seq]) -> None:
        """Make the state match exactly these sequences.

        Compares only counts and ends if none joined or left unnoticed.
        """
        known = self._entries
        if len(seqs) == len(known) and (not seqs or (seqs[0] in known and seqs[-1] in known)):
            return
        for seq in set(known).difference(seqs):
            self._forget(seq)
        for seq in seqs:
            if seq not in known:
                self._enter(seq)


def _order(entry: Entry) -> tuple[Key, float, str]:
    return entry[:3]
