"""Which waiting decode stage goes to which decode instance now: one pass over those that wait, in their order.

The migrator follows what happens to a transfer; `Placing` chooses among the instances that its KV can get to (`Reach`)
as the placement policy says (dispatch.disaggregation.placements), and starts over what cannot leave its instance.

A pass looks at a bounded number of requests of each model that find no place. Requests that wait for an instance or a
link, not for room, must not use that number up: behind them may be one whose decode instance is idle. `Stuck` has one
of each kind looked at and the others passed over, which costs little however many there are.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

from controller.core import events as ev
from controller.core.decisions import Decision, Figure
from controller.core.kv_links import OTHER_MODEL
from controller.core.types import Request
from controller.dispatch.disaggregation.link_book import Ask, LinkBook, Trial
from controller.dispatch.disaggregation.placements import Choice, Placement, Prefilled
from controller.dispatch.disaggregation.reach import IncompatiblePeers, Reach
from controller.dispatch.disaggregation.rollback import Rollback
from controller.dispatch.disaggregation.transfers import DecodeTransfer, Entry, MigratorConfig, TransferQueue
from controller.dispatch.lifecycle import UNDER_WAY, On, State
from controller.dispatch.shadow_state import Roster, Worker

# Two requests of one kind can go to the same instances over the same links: source, model, a pair or not, and which
# contexts of the model's instances hold the prompt, and prompt and answer. Instances that failed one of them make no
# difference: a request with only such left waits for room as well.
Kind = tuple[str, str, bool, tuple[int, int]]
ALIKE = (0, 0)  # all contexts are of one length


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

    def place_waiting(self, now: float, actions: list[ev.Action]) -> None:
        """Alg. 1's scan. Hopeless requests get their turn once no other of their model waits."""
        stuck = Stuck(self._roster.workers)
        behind = self._scan(list(self._queue.waiting), stuck, now, actions)
        behind |= stuck.competing
        last = [entry for entry in self._queue.hopeless if entry[1].stage.request.model not in behind]
        if last:
            self._scan(last, stuck, now, actions)

    def _scan(self, waiting: Sequence[Entry], stuck: Stuck, now: float, actions: list[ev.Action]) -> set[str]:
        """Place what finds an instance; of each model until `scan_limit` requests found no room. Returns the models
        with such requests; those that room would not help are not counted."""
        roomless: Counter[str] = Counter()
        ended: set[str] = set()
        for _, transfer in waiting:
            model = transfer.stage.request.model
            over = model in ended and not transfer.target  # an instance chosen in advance has its room already
            if over or transfer.not_before > now or stuck.passes_over(transfer, now):
                continue
            if self._finds_no_room(transfer, stuck, now, actions):
                roomless[model] += 1
                if roomless[model] >= self.config.scan_limit:
                    ended.add(model)
        return set(roomless)

    def _finds_no_room(self, transfer: DecodeTransfer, stuck: Stuck, now: float, actions: list[ev.Action]) -> bool:
        """Place it, unless it has to wait for room (True)."""
        able = self._reach.decoders(transfer, now)
        transfer.incompatible = not able and self._reach.only_incompatible(transfer, now)
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
                return self._waits_for_instance(transfer, able, stuck, now, actions)
        choice = self._placement.choose(self._stage(transfer, reached), reached, now) if reached else None
        if choice is None and now - transfer.since >= self.config.hold_s:
            choice = self._any(reached)
        if choice is not None:
            self.assign(transfer, choice, now)
            self._place(transfer, choice.reason, now, actions)
        return choice is None

    def _waits_for_instance(
        self, transfer: DecodeTransfer, able: Sequence[Worker], stuck: Stuck, now: float, actions: list[ev.Action]
    ) -> bool:
        """No decode instance can take it, and no other instance could prefill it: it waits for a link, or for an
        instance until it is given up."""
        if able:
            rest = self._reach.at_worst(transfer, able, math.inf, now)  # they would take it if they had room
            return self._cut_off(transfer, rest, self.config.link_patience_s, stuck)
        if transfer.incompatible and self._reach.may_come(transfer):
            transfer.incompatible = False  # one that reads its KV may come: it waits as without any decode instance
        if now - transfer.since >= self._hold_s(transfer):
            self._rollback.give_up(transfer, without_decoder(transfer), now, actions)
        else:
            stuck.add(transfer, self._most_s(transfer), competes=False)
        return False

    def _cut_off(self, transfer: DecodeTransfer, full: Sequence[Worker], for_s: float, stuck: Stuck) -> bool:
        """It waits for a link; for room too (True) if one leads to an instance that is `full`."""
        if full:
            return True
        stuck.add(transfer, for_s, competes=True)
        return False

    def turned_away(self, transfer: DecodeTransfer, now: float, actions: list[ev.Action]) -> bool:
        """Its prefill was sent to an instance whose KV no decode instance reads, as others found out or one is finding
        out: it starts over elsewhere before it is computed. Only once, or a request that no other instance takes would
        go round. Where every decode instance is in doubt, it is the one that finds out."""
        source = transfer.source
        if transfer.paired or source in transfer.request.avoid:
            return False
        able = self._reach.decoders(transfer, now)
        doubted = bool(able) and self._incompatible.doubted(source, [w.id for w in able])
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

    def _most_s(self, transfer: DecodeTransfer) -> float:
        """Seconds until a request that waits for an instance is given up: fewer with incompatible peers only."""
        return min(self.config.strangers_hold_s, self.config.hold_s) if transfer.incompatible else self.config.hold_s

    def _hold_s(self, transfer: DecodeTransfer) -> float:
        """The same for this request: no longer than it would have waited for a prefill instance."""
        return min(self._most_s(transfer), transfer.request.targets.waiting_time_s)

    def _waits_for_trial(self, transfer: DecodeTransfer, candidates: Sequence[Worker], now: float) -> bool:
        """While another transfer tries a link from its source it does not start over, for a while: the link may be good
        in a moment, and its KV would be lost. Of a pair nothing is computed yet."""
        return not transfer.paired and self._reach.tried(transfer, candidates, self.config.link_patience_s, now)

    def _turns_hopeless(self, transfer: DecodeTransfer, able: Sequence[Worker], now: float) -> bool:
        if transfer.target or not able:
            return False
        if not self._placement.hopeless(self._stage(transfer, able), able, now):
            return False
        self._queue.turn_hopeless(transfer)
        return True

    def _stage(self, transfer: DecodeTransfer, workers: Sequence[Worker]) -> Prefilled:
        """With the seconds its KV would take, for a placement that reads them."""
        if not self._placement.measures_links:
            return transfer.stage
        return transfer.stage._replace(move_s=self._reach.moves(transfer, workers))

    def _any(self, candidates: Sequence[Worker]) -> Choice | None:
        worker = min(candidates, key=lambda w: (w.outstanding, w.last_sent, w.id), default=None)
        return Choice(worker, "held_too_long", binds=False) if worker is not None else None

    def assign(self, transfer: DecodeTransfer, choice: Choice, now: float) -> None:
        """Choose this instance: from now on the shadow state counts it there."""
        self._serial += 1
        transfer.target = choice.worker.id
        choice.worker.send(transfer.request, now, self._rank(transfer.request), self._serial, binds=choice.binds)

    def _place(self, transfer: DecodeTransfer, reason: str, now: float, actions: list[ev.Action]) -> None:
        request, worker = transfer.request, self._roster.workers[transfer.target]
        figures: dict[str, Figure] = {
            "policy": self._name,
            "source": transfer.source,
            "waited_s": now - transfer.since,
            "slack_s": transfer.stage.slack_s(now),
            "decode_s": worker.decode_s(),
            "outstanding": worker.outstanding,
            "kv_tokens": transfer.kv_tokens,
        }
        others = [w for w in self._reach.decoders(transfer, now) if w is not worker]
        rejected: dict[str, Figure] = {w.id: f"{w.outstanding} outstanding" for w in others} if len(others) <= 8 else {}
        self._queue.advance(transfer, On.PLACE, now)
        self._links.placed((transfer.source, worker.id), transfer, self._trial(transfer, worker.id, now), now)
        if transfer.paired and transfer.early:
            self._rollback.prefill_begins(transfer, now)
        decision = Decision("place", reason, request.id, now, figures, rejected)
        actions.append(ev.Place(request, transfer.source, worker.id, self._rank(request), decision))

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

    def _rank(self, request: Request) -> int:
        """Lower is more urgent; microseconds a token, so that neighbours differ."""
        return round(1e6 * request.targets.tpot_s) if self.config.engine_rank == "tpot" else 0

    def next_at(self, now: float) -> float:
        """The next time-out, retry, or decode step whose end may make room."""
        at = self._rollback.next_at()
        waiting = [transfer for _, transfer in (*self._queue.waiting, *self._queue.hopeless)]
        if waiting:
            # Their pace falls while they wait, so a request becomes hopeless by time alone.
            steps = (w.decode_s() for w in self._roster.workers.values() if w.takes_decodes and w.outstanding)
            at = min(at, now + max(self.config.retry_s, min(steps, default=math.inf)))
            turns = ((t.not_before, t.since + self._hold_s(t), t.since + self._most_s(t)) for t in waiting)
            at = min(at, min((turn for each in turns for turn in each if turn > now), default=math.inf))
        return at


def without_decoder(transfer: DecodeTransfer) -> str:
    """The reason why no decode instance is left for it."""
    return OTHER_MODEL if transfer.incompatible else "no_decode_instance"


class Stuck:
    """Waiting decode stages that room would not help: what a pass finds out about one holds for all of its kind.

    For one pass, during which no instance changes. Times are seconds since a transfer began to wait.
    """

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self.competing: set[str] = set()  # models with requests that wait for an instance which others may take
        self._workers = workers
        self._found: dict[Kind, tuple[float, bool, bool]] = {}
        self._contexts: dict[str, list[int]] = {}  # of each model's instances, sorted

    def add(self, transfer: DecodeTransfer, for_s: float, *, competes: bool) -> None:
        """Its kind is passed over from now on. A request that has waited for `for_s` is still looked at itself, and,
        where none competes, so that it ends by being given up, one that has waited for as long as it may."""
        self._found[self._kind(transfer)] = (for_s, competes, transfer.incompatible)
        if competes:
            self.competing.add(transfer.request.model)

    def passes_over(self, transfer: DecodeTransfer, now: float) -> bool:
        """Does what was found out hold for it too? Not if its instance is chosen already."""
        if not self._found or transfer.target:
            return False
        found = self._found.get(self._kind(transfer))
        if found is None:
            return False
        for_s, competes, incompatible = found
        if now - transfer.since >= (for_s if competes else min(for_s, transfer.request.targets.waiting_time_s)):
            return False
        transfer.incompatible = incompatible
        return True

    def _kind(self, transfer: DecodeTransfer) -> Kind:
        request = transfer.stage.request
        model = request.model
        lengths = self._contexts.get(model)
        if lengths is None:
            lengths = self._contexts[model] = self._lengths(model)
        contexts = _held_by(lengths, request) if len(lengths) > 1 else ALIKE
        return transfer.source, model, transfer.paired, contexts

    def _lengths(self, model: str) -> list[int]:
        return sorted({worker.spec.max_model_len for worker in self._workers.values() if worker.spec.model == model})


def _held_by(lengths: list[int], request: Request) -> tuple[int, int]:
    tokens = request.prompt_tokens
    return bisect_left(lengths, tokens + 1), bisect_left(lengths, tokens + (request.max_tokens or 1))
