"""Which waiting decode stage goes to which decode instance now: one pass over those that wait, in their order.

The migrator follows what happens to a transfer; `Placing` chooses among the instances that its KV can get to (`Reach`)
as the placement policy says (dispatch.disaggregation.placements), and starts over what cannot leave its instance.

A pass looks at a bounded number of requests of each model that find no place. Requests that wait for an instance or a
link, not for room, must not use that number up: behind them may be one whose decode instance is idle. One of each such
kind is looked at and the others are passed over (dispatch.disaggregation.transfers).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from controller.core import events as ev
from controller.core.decisions import Alternative, Decision, Figure
from controller.core.kv_links import OTHER_MODEL
from controller.dispatch.disaggregation.link_book import Ask, LinkBook, Trial
from controller.dispatch.disaggregation.migrator_config import MigratorConfig
from controller.dispatch.disaggregation.placements import Choice, Placement, Prefilled
from controller.dispatch.disaggregation.reach import IncompatiblePeers, Reach
from controller.dispatch.disaggregation.rollback import Rollback
from controller.dispatch.disaggregation.transfers import (
    DecodeTransfer,
    Kind,
    Stuck,
    Tier,
    TransferQueue,
)
from controller.dispatch.lane import MOST_NAMED
from controller.dispatch.lifecycle import UNDER_WAY, On, State
from controller.dispatch.shadow_state import Roster, ShadowInstance

StuckKinds = dict[Kind, Stuck]  # of one model, in one pass


class Placing:
    """Shares its parts with its migrator, whose `name` stands in its decisions."""

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
        self.offset_s = 0.0  # from this clock to the one that all gateways share

    def place_waiting(self, now: float, actions: list[ev.Action]) -> None:
        """Alg. 1's scan, for each model that may have room now. Hopeless requests get their turn once no other of their
        model waits."""
        for model, line in self._queue.to_look_at(now):
            line.changed, line.looked_at = False, now
            stuck: StuckKinds = {}
            behind = self._scan(line.ready, stuck, now, actions)
            if line.late.groups and not behind and not any(each.competes for each in stuck.values()):
                self._scan(line.late, stuck, now, actions)
            line.polls_at = now + max(self.config.retry_s, self._next_step_s(model)) if len(line) else math.inf

    def _scan(self, tier: Tier, stuck: StuckKinds, now: float, actions: list[ev.Action]) -> bool:
        """Place what finds an instance, until `scan_limit` requests found no room; those that room would not help are
        not counted. Returns whether any found no room."""
        roomless, scan = 0, tier.scan()
        for kind, found in stuck.items():
            if kind in tier.groups:
                scan.stick(tier.groups[kind], found, now)
        while (head := scan.next()) is not None:
            group, transfer = head
            order = transfer.order
            if transfer.group is group:  # else it left while others were looked at
                kind, before = group.kind, stuck.get(group.kind)
                roomless += self._finds_no_room(transfer, roomless == 0, stuck, now, actions)
                if stuck.get(kind) is not before:
                    scan.stick(group, stuck[kind], now)
                if roomless >= self.config.scan_limit:
                    scan.only_chosen()  # their room is reserved already
            scan.on(group, order)
        return roomless > 0

    def _finds_no_room(
        self, transfer: DecodeTransfer, in_turn: bool, stuck: StuckKinds, now: float, actions: list[ev.Action]
    ) -> bool:
        """Place it, unless it has to wait for room (True). `in_turn`: none before it does."""
        able = self._reach.decoders(transfer, now)
        transfer.incompatible = not able and self._reach.only_incompatible(transfer, now)
        if able:
            self._queue.found_incompatible(transfer, now)
        if not transfer.hopeless and self._turns_hopeless(transfer, able, now):
            return False
        if transfer.target:  # chosen when the prefill was sent
            self._place(transfer, "one_shot", now, actions)
            return False
        candidates = self._reach.candidates(transfer, able)
        reached = self._reach.reached(transfer, candidates, now)
        # If a full one is reached it waits for room there: prefilled elsewhere it might find no more, and lose a try.
        if not reached and (candidates or not able) and not self._reach.reached(transfer, able, now):
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
                return self._waits_for_instance(transfer, able, stuck, now, actions)
        stage = self._stage(transfer, reached)
        choice = self._placement.choose(stage._replace(in_turn=in_turn), reached, now) if reached else None
        if choice is None and now - transfer.since >= self.config.hold_s:
            choice = self._any(reached)
        if choice is not None:
            self.assign(transfer, choice, now)
            self._place(transfer, choice.reason, now, actions)
        return choice is None

    def _waits_for_instance(
        self,
        transfer: DecodeTransfer,
        able: Sequence[ShadowInstance],
        stuck: StuckKinds,
        now: float,
        actions: list[ev.Action],
    ) -> bool:
        """No decode instance can take it, and no other instance could prefill it: it waits for a link, or for an
        instance until it is given up."""
        if able:
            rest = self._reach.at_worst(transfer, able, math.inf, now)  # they would take it if they had room
            return self._cut_off(transfer, rest, self.config.link_patience_s, stuck)
        if transfer.incompatible and self._reach.may_come(transfer):
            transfer.incompatible = False  # one that reads its KV may come: it waits as without any decode instance
        self._queue.found_incompatible(transfer, now)
        if now - transfer.since >= self._queue.hold_s(transfer):
            self._rollback.give_up(transfer, without_decoder(transfer), now, actions)
        else:
            self._sticks(transfer, Stuck(self._queue.most_s(transfer), competes=False), stuck)
        return False

    def _cut_off(
        self, transfer: DecodeTransfer, full: Sequence[ShadowInstance], for_s: float, stuck: StuckKinds
    ) -> bool:
        """It waits for a link; for room too (True) if one leads to an instance that is `full`."""
        if full:
            return True
        self._sticks(transfer, Stuck(for_s, competes=True), stuck)
        return False

    def _sticks(self, transfer: DecodeTransfer, how: Stuck, stuck: StuckKinds) -> None:
        if transfer.group is not None:
            stuck[transfer.group.kind] = how

    def turned_away(self, transfer: DecodeTransfer, now: float, actions: list[ev.Action]) -> bool:
        """Its prefill was sent to an instance whose KV no decode instance reads, as others found out or one is finding
        out: it starts over elsewhere before it is computed. Only once, or a request that no other instance takes would
        go round. Where every decode instance is in doubt, it is the one that finds out."""
        source = transfer.source
        if transfer.paired or source in transfer.request.avoid:
            return False
        able = self._reach.decoders(transfer, now)
        doubted = bool(able) and self._incompatible.doubted(source, [each.id for each in able])
        if doubted and not self._incompatible.tried(source):
            self._incompatible.tries(transfer)
            return False
        if not doubted and (able or not self._reach.only_incompatible(transfer, now)):
            return False
        avoid = self._reach.but_for(frozenset({source}), transfer.request, now)
        if avoid is None:
            return False
        self._rollback.prefill_again(transfer, OTHER_MODEL, now, actions, avoid)
        return True

    def _waits_for_trial(self, transfer: DecodeTransfer, candidates: Sequence[ShadowInstance], now: float) -> bool:
        """While another transfer tries a link from its source it does not start over, for a while: the link may be good
        in a moment, and its KV would be lost. Of a pair nothing is computed yet."""
        return not transfer.paired and self._reach.tried(transfer, candidates, self.config.link_patience_s, now)

    def _turns_hopeless(self, transfer: DecodeTransfer, able: Sequence[ShadowInstance], now: float) -> bool:
        if transfer.target or not able:
            return False
        if not self._placement.hopeless(self._stage(transfer, able), able, now):
            return False
        self._queue.turn_hopeless(transfer, now)
        return True

    def _stage(self, transfer: DecodeTransfer, instances: Sequence[ShadowInstance]) -> Prefilled:
        """With the seconds its KV would take, for a placement that reads them."""
        if not self._placement.measures_links:
            return transfer.stage
        return transfer.stage._replace(move_s=self._reach.moves(transfer, instances))

    def _any(self, candidates: Sequence[ShadowInstance]) -> Choice | None:
        instance = min(candidates, key=lambda each: (each.outstanding, each.last_sent, each.id), default=None)
        return Choice(instance, "held_too_long", binds=False) if instance is not None else None

    def assign(self, transfer: DecodeTransfer, choice: Choice, now: float) -> None:
        """Choose this instance: from now on the shadow state counts it there."""
        self._serial += 1
        transfer.target = choice.instance.id
        transfer.rank = self._rank(transfer, choice.instance, now)
        choice.instance.send(transfer.request, now, transfer.rank, self._serial, binds=choice.binds)

    def _place(self, transfer: DecodeTransfer, reason: str, now: float, actions: list[ev.Action]) -> None:
        request, instance = transfer.request, self._roster.instances[transfer.target]
        figures: dict[str, Figure] = {
            "policy": self._name,
            "source": transfer.source,
            "waited_s": now - transfer.since,
            "slack_s": transfer.stage.slack_s(now),
            "decode_s": instance.decode_s(),
            "outstanding": instance.outstanding,
            "kv_tokens": transfer.kv_tokens,
        }
        others = [each for each in self._reach.decoders(transfer, now) if each is not instance]
        rejected: dict[str, Alternative] = (
            {each.id: {"outstanding": each.outstanding} for each in others} if len(others) <= MOST_NAMED else {}
        )
        self._queue.advance(transfer, On.PLACE, now)
        transfer.placed_at = now
        self._links.placed((transfer.source, instance.id), transfer, self._trial(transfer, instance.id, now), now)
        if transfer.paired and transfer.early:
            self._rollback.prefill_begins(transfer, now)
        decision = Decision("place", reason, request.id, now, figures, rejected)
        actions.append(ev.Place(request, transfer.source, instance.id, transfer.rank, decision))

    def _trial(self, transfer: DecodeTransfer, target: str, placed_at: float) -> Ask:
        """How to look up whether the result of this transfer will tell if its link is good.

        After a landing that is only assumed the link stays closed for `link_patience_s` at most: the answer, which
        would tell, may take minutes.
        """

        def stands(now: float) -> Trial:
            if self._queue.get(transfer.request.id) is not transfer or transfer.target != target:
                return Trial.VANISHED
            if transfer.state is State.COMMITTED and transfer.assumed:
                return Trial.ON_ITS_WAY if now < placed_at + self.config.link_patience_s else Trial.UNHEARD
            return Trial.ON_ITS_WAY if transfer.state in UNDER_WAY else Trial.VANISHED

        return stands

    def _rank(self, transfer: DecodeTransfer, instance: ShadowInstance, now: float) -> int:
        """The rank its engine is given: lower is more urgent. By slot: milliseconds on the clock that gateways share;
        by TPOT: microseconds a token, so that neighbours differ."""
        if self.config.engine_rank == "slot":
            return round(1e3 * (self.offset_s + transfer.stage.slot_due(instance, now)))
        return round(1e6 * transfer.request.targets.tpot_s) if self.config.engine_rank == "tpot" else 0

    def next_at(self, now: float) -> float:
        """The next time-out, retry, or decode step whose end may make room."""
        # What is left of their TTFT falls while they wait, so a request becomes hopeless by time alone.
        polls = (line.polls_at for line in self._queue.lines.values() if line.tries)
        return min((self._rollback.next_at(), *polls))

    def _next_step_s(self, model: str) -> float:
        """Until the first decode step of the model's instances ends; infinite if none runs."""
        instances = self._roster.of_model(model)
        return min((each.decode_s() for each in instances if each.takes_decodes and each.outstanding), default=math.inf)


def without_decoder(transfer: DecodeTransfer) -> str:
    """The reason why no decode instance is left for it."""
    return OTHER_MODEL if transfer.incompatible else "no_decode_instance"
