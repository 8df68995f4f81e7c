"""Which waiting decode stage goes to which decode instance now: one pass over those that wait, in their order.

The migrator (dispatch.migrator) says what happens to a transfer; this half of it chooses among the instances that its
KV can get to (dispatch.reach) by what the placement says (dispatch.placements), and lets begin anew what cannot leave.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from controller.core import events as ev
from controller.core.decisions import Decision, Figure
from controller.core.kv_links import OTHER_MODEL
from controller.core.types import Request
from controller.dispatch.disaggregation.incompatible_peers import IncompatiblePeers
from controller.dispatch.disaggregation.link_book import Ask, LinkBook, Trial
from controller.dispatch.disaggregation.placements import Choice, Placement, Prefilled
from controller.dispatch.disaggregation.reach import Reach
from controller.dispatch.disaggregation.rollback import Rollback
from controller.dispatch.disaggregation.stuck import Stuck
from controller.dispatch.disaggregation.transfer_queue import Entry, TransferQueue
from controller.dispatch.disaggregation.transfers import MigratorConfig, Transfer
from controller.dispatch.lifecycle import UNDER_WAY, On, State
from controller.dispatch.shadow_state import Roster, Worker


class Placing:
    """Shares its parts with its migrator, whose `name` its decisions say."""

    def __init__(
        self,
        name: str,
        config: MigratorConfig,
        placement: Placement,
        queue: TransferQueue,
        roster: Roster,
        links: LinkBook,
        reach: Reach,
        incompatible: IncompatiblePeers,
        rollback: Rollback,
    ) -> None:
        self.config = config
        self._name = name
        self._placement = placement
        self._queue = queue
        self._roster = roster
        self._links = links
        self._reach = reach
        self._incompatible = incompatible
        self._rollback = rollback
        self._serial = 0

    def place_waiting(self, now: float, actions: list[ev.Action]) -> None:
        """Alg. 1's scan; the hopeless get their turn when it left nobody of their model behind: no other's instances
        would take them."""
        stuck = Stuck(self._roster.workers)
        behind = self._scan(list(self._queue.waiting), stuck, now, actions)
        behind |= stuck.competing
        last = [entry for entry in self._queue.hopeless if entry[1].stage.request.model not in behind]
        if last:
            self._scan(last, stuck, now, actions)

    def _scan(self, waiting: Sequence[Entry], stuck: Stuck, now: float, actions: list[ev.Action]) -> set[str]:
        """Models of which somebody found no room, each until `scan_limit` were looked at; those that no room would help
        are not counted."""
        roomless: Counter[str] = Counter()
        ended: set[str] = set()
        for _, transfer in waiting:
            model = transfer.stage.request.model
            over = model in ended and not transfer.target  # a choice made at the sending has its room already
            if over or transfer.not_before > now or stuck.passes_over(transfer, now):
                continue
            if self._finds_no_room(transfer, stuck, now, actions):
                roomless[model] += 1
                if roomless[model] >= self.config.scan_limit:
                    ended.add(model)
        return set(roomless)

    def _finds_no_room(self, transfer: Transfer, stuck: Stuck, now: float, actions: list[ev.Action]) -> bool:
        """Place it, unless it has to wait."""
        able = self._reach.decoders(transfer, now)
        transfer.strange = not able and self._reach.among_strangers(transfer, now)
        if not transfer.hopeless and self._turns_hopeless(transfer, able, now):
            return False
        if transfer.target:  # chosen when the prefill was sent
            self._place(transfer, "one_shot", now, actions)
            return False
        candidates = self._reach.candidates(transfer, able)
        reached = self._reach.reached(transfer, candidates, now)
        if not reached and (candidates or not able):
            avoid = self._reach.other_way(transfer, candidates, now)
            if avoid is not None and self._waits_for_trial(transfer, candidates, now):
                return self._cut_off(transfer, self._reach.reached(transfer, able, now), math.inf, stuck)
            if avoid is not None:
                self._rollback.free(transfer, now, actions)
                reason = "links_down" if candidates else without_decoder(transfer)
                self._rollback.prefill_again(transfer, reason, now, actions, avoid)
                return False
            reached = self._reach.at_worst(transfer, candidates, self.config.link_patience_s, now)
            if not reached:
                return self._waits_for_somebody(transfer, able, stuck, now, actions)
        choice = self._placement.choose(self._stage(transfer, reached), reached, now) if reached else None
        if choice is None and now - transfer.since >= self.config.hold_s:
            choice = self._any(reached)
        if choice is not None:
            self.assign(transfer, choice, now)
            self._place(transfer, choice.reason, now, actions)
        return choice is None

    def _waits_for_somebody(
        self, transfer: Transfer, able: Sequence[Worker], stuck: Stuck, now: float, actions: list[ev.Action]
    ) -> bool:
        """No decode instance can take it, and nobody else could begin it anew: for a link, or for an instance, until it
        is given up."""
        if able:
            rest = self._reach.at_worst(transfer, able, math.inf, now)  # would be taken, had they room
            return self._cut_off(transfer, rest, self.config.link_patience_s, stuck)
        if transfer.strange and self._reach.may_come(transfer):
            transfer.strange = False  # somebody may come who reads it, as where nobody is there at all
        if now - transfer.since >= self._hold_s(transfer):
            self._rollback.give_up(transfer, without_decoder(transfer), now, actions)
        else:
            stuck.add(transfer, self._most_s(transfer), competes=False)
        return False

    def _cut_off(self, transfer: Transfer, full: Sequence[Worker], for_s: float, stuck: Stuck) -> bool:
        """Links are what it waits for; room too, if one leads to somebody who is `full`."""
        if full:
            return True
        stuck.add(transfer, for_s, competes=True)
        return False

    def turned_away(self, transfer: Transfer, now: float, actions: list[ev.Action]) -> bool:
        """Its prefill was sent where nobody reads what is computed, as others found out, or as one is finding out: it
        begins elsewhere before it is computed. Not for the second time, or one that nobody else takes would go round.
        Of those that stay where each decode instance is in doubt, it is the one that finds out."""
        source = transfer.source
        if transfer.paired or source in transfer.request.avoid:
            return False
        able = self._reach.decoders(transfer, now)
        doubted = bool(able) and self._incompatible.doubted(source, [w.id for w in able])
        if doubted and not self._incompatible.tried(source):
            self._incompatible.tries(transfer)
            return False
        if not doubted and (able or not self._reach.among_strangers(transfer, now)):
            return False
        avoid = self._reach.but_for(frozenset({source}), transfer.request, now)
        if avoid is None:
            return False
        self._rollback.prefill_again(transfer, OTHER_MODEL, now, actions, avoid)
        return True

    def _most_s(self, transfer: Transfer) -> float:
        """Seconds until anybody is given up who waits for an instance: fewer where only strangers are there."""
        return min(self.config.strangers_hold_s, self.config.hold_s) if transfer.strange else self.config.hold_s

    def _hold_s(self, transfer: Transfer) -> float:
        """And this one: for no longer than it would have waited for a prefill instance."""
        return min(self._most_s(transfer), transfer.request.targets.waiting_time_s)

    def _waits_for_trial(self, transfer: Transfer, candidates: Sequence[Worker], now: float) -> bool:
        """While another transfer tries a link from here it does not begin anew, for a while: its KV would be thrown
        away for a way that may be open in a moment. Of a pair nothing is computed yet."""
        return not transfer.paired and self._reach.tried(transfer, candidates, self.config.link_patience_s, now)

    def _turns_hopeless(self, transfer: Transfer, able: Sequence[Worker], now: float) -> bool:
        if transfer.target or not able or not self._placement.hopeless(transfer.stage, able, now):
            return False
        self._queue.turn_hopeless(transfer)
        return True

    def _stage(self, transfer: Transfer, workers: Sequence[Worker]) -> Prefilled:
        """With the seconds its KV would take, for a placement that asks."""
        if not self._placement.measures_links:
            return transfer.stage
        return transfer.stage._replace(move_s=self._reach.moves(transfer, workers))

    def _any(self, candidates: Sequence[Worker]) -> Choice | None:
        worker = min(candidates, key=lambda w: (w.outstanding, w.last_sent, w.id), default=None)
        return Choice(worker, "held_too_long", binds=False) if worker is not None else None

    def assign(self, transfer: Transfer, choice: Choice, now: float) -> None:
        """From now on the shadow state counts it there."""
        self._serial += 1
        transfer.target = choice.worker.id
        choice.worker.send(transfer.request, now, self._rank(transfer.request), self._serial, binds=choice.binds)

    def _place(self, transfer: Transfer, reason: str, now: float, actions: list[ev.Action]) -> None:
        request, worker = transfer.request, self._roster.workers[transfer.target]
        figures: dict[str, Figure] = {
            "policy": self._name,
            "source": transfer.source,
            "waited_s": now - transfer.since,
            "pace_s": transfer.stage.pace_s(now) if request.output_tokens > 1 else None,
            "decode_s": worker.decode_s(),
            "outstanding": worker.outstanding,
            "kv_tokens": transfer.kv_tokens,
        }
        others = [w for w in self._reach.decoders(transfer, now) if w is not worker]
        rejected: dict[str, Figure] = (
            {w.id: f"{w.outstanding} requests there" for w in others} if len(others) <= 8 else {}
        )
        self._queue.advance(transfer, On.PLACE, now)
        self._links.placed((transfer.source, worker.id), transfer, self._trial(transfer, worker.id, now), now)
        if transfer.paired and transfer.early:
            self._rollback.prefill_begins(transfer, now)
        decision = Decision("place", reason, request.id, now, figures, rejected)
        actions.append(ev.Place(request, transfer.source, worker.id, self._rank(request), decision))

    def _trial(self, transfer: Transfer, target: str, placed_at: float) -> Ask:
        """Will what becomes of it tell whether its link is good? Behind a landing that is only assumed nobody waits for
        longer than for any link: the answer, which would tell, may take minutes."""

        def stands(now: float) -> Trial:
            if self._queue.get(transfer.request.id) is not transfer or transfer.target != target:
                return Trial.VANISHED
            if transfer.state is State.COMMITTED and transfer.assumed:
                return Trial.ON_ITS_WAY if now < placed_at + self.config.link_patience_s else Trial.UNHEARD
            return Trial.ON_ITS_WAY if transfer.state in UNDER_WAY else Trial.VANISHED

        return stands

    def _rank(self, request: Request) -> int:
        """Lower is more urgent; microseconds a token, so that neighbours differ."""
        return round(1e6 * request.targets.tpot_s) if self.config.engine_rank == "tpot" else 0

    def next_at(self, now: float) -> float:
        """The next time-out, retry, or decode step whose end may make room."""
        at = self._rollback.next_at()
        waiting = [transfer for _, transfer in (*self._queue.waiting, *self._queue.hopeless)]
        if waiting:
            # Pace falls while they wait: a request becomes hopeless by time alone.
            steps = (w.decode_s() for w in self._roster.workers.values() if w.takes_decodes and w.outstanding)
            at = min(at, now + max(self.config.retry_s, min(steps, default=math.inf)))
            turns = ((t.not_before, t.since + self._hold_s(t), t.since + self._most_s(t)) for t in waiting)
            at = min(at, min((turn for each in turns for turn in each if turn > now), default=math.inf))
        return at


def without_decoder(transfer: Transfer) -> str:
    """Why no decode instance is left for it."""
    return OTHER_MODEL if transfer.strange else "no_decode_instance"
