"""Time-outs, retries and rollback of decode stages, and the release of KV that is no longer needed.

The migrator follows what happens to a transfer; `Rollback` decides what follows when that fails or does not happen in
time: the stage is placed again, its request is prefilled again, or it is given up. Every state has a time-out
(`MigratorConfig`) and a rollback (`State`).

`KvReleases` outlive their transfer, since an answer may be over before the prefill engine has heard of it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from controller.core import events as ev
from controller.core.decisions import Decision, Figure
from controller.core.kv_links import OTHER_MODEL
from controller.dispatch.disaggregation.link_book import LinkBook
from controller.dispatch.disaggregation.migrator_config import MigratorConfig
from controller.dispatch.disaggregation.reach import IncompatiblePeers, Reach
from controller.dispatch.disaggregation.transfers import DecodeTransfer, TransferQueue
from controller.dispatch.lifecycle import UNDER_WAY, On, State
from controller.dispatch.shadow_state import Roster

Kept = tuple[str, str]  # request, prefill instance


class Rollback:
    """Shares its parts with its migrator. `now` is in seconds and never goes backwards."""

    def __init__(
        self,
        config: MigratorConfig,
        queue: TransferQueue,
        roster: Roster,
        links: LinkBook,
        reach: Reach,
        incompatible: IncompatiblePeers,
        one_shot: bool,
    ) -> None:
        self.config = config
        self.kv_releases = KvReleases(config.release_timeout_s, config.release_tries)
        self._queue = queue
        self._roster = roster
        self._links = links
        self._reach = reach
        self._incompatible = incompatible
        self._one_shot = one_shot
        self._prefills: list[
            tuple[float, int, DecodeTransfer]
        ] = []  # heap by `overdue_at`; ended ones leave at its top
        self._serial = 0

    # ---- time-outs -------------------------------------------------------------------------------------------------

    def prefill_begins(self, transfer: DecodeTransfer, now: float) -> None:
        """Its time-out starts: the time it is expected to take, and `prefilling_timeout_s`."""
        self._serial += 1
        transfer.overdue_at = now + transfer.prefill_s + self.config.prefilling_timeout_s
        heapq.heappush(self._prefills, (transfer.overdue_at, self._serial, transfer))

    def overdue(self, now: float, actions: list[ev.Action]) -> None:
        """Roll back what has lasted too long."""
        while self._next_prefill() <= now:
            transfer = self._prefills[0][2]
            self.prefill_again(transfer, "prefilling_timeout", now, actions, frozenset({transfer.source}))
        for transfer in self._queue.due(now):
            if transfer.state in UNDER_WAY:
                reason = f"{transfer.state.value}_timeout"
                actions.append(ev.Abort(transfer.request.id, transfer.target, reason))
                self.failed(transfer, reason, now, actions)
            elif now >= self._queue.waits_until(transfer):
                self.give_up(transfer, "waiting_timeout", now, actions)
        self.kv_releases.overdue(now, actions)

    def next_at(self) -> float:
        """When the next of them is overdue."""
        return min(self._next_prefill(), self.kv_releases.next_at(), self._queue.next_turn())

    def _next_prefill(self) -> float:
        while self._prefills:
            at, _, transfer = self._prefills[0]
            current = self._queue.get(transfer.request.id) is transfer and transfer.overdue_at == at
            if current and transfer.prefilling:
                return at
            heapq.heappop(self._prefills)
        return math.inf

    # ---- rollback --------------------------------------------------------------------------------------------------

    def forget(self, request_id: str) -> DecodeTransfer | None:
        transfer = self._queue.pop(request_id)
        if transfer is not None:
            self._queue.changed(transfer.request.model)
        if transfer is not None and transfer.target in self._roster.instances:
            self._roster.instances[transfer.target].remove(request_id)
        return transfer

    def free(self, transfer: DecodeTransfer, now: float, actions: list[ev.Action]) -> None:
        """Free its KV at its prefill instance."""
        self.kv_releases.ask(transfer.request.id, transfer.source, now, actions)

    def prefill_again(
        self,
        transfer: DecodeTransfer,
        reason: str,
        now: float,
        actions: list[ev.Action],
        avoid: frozenset[str] = frozenset(),
    ) -> None:
        request = transfer.request
        runs = transfer.prefilling and not transfer.paired and transfer.source in self._roster.instances
        if runs:  # it is stopped, but may have ended just now
            self.free(transfer, now, actions)
        if transfer.target and transfer.state is not State.PREFILLING:
            actions.append(ev.Abort(request.id, transfer.target, reason))
        self.forget(request.id)
        figures: dict[str, Figure] = {"instance": transfer.source, "state": transfer.state.value}
        counts = reason != OTHER_MODEL or transfer.source in request.avoid
        avoid = self._avoided(transfer, avoid)
        actions.append(ev.PrefillAgain(request, Decision("place", reason, request.id, now, figures), avoid, counts))

    def lost_at_target(self, transfer: DecodeTransfer, reason: str, now: float, actions: list[ev.Action]) -> None:
        """Its decode instance failed when no other instance had its KV any more."""
        request = transfer.request
        self.forget(request.id)
        figures: dict[str, Figure] = {"instance": transfer.target, "error": reason}
        actions.append(ev.PrefillAgain(request, Decision("place", "decode_failed", request.id, now, figures)))

    def _avoided(self, transfer: DecodeTransfer, avoid: frozenset[str]) -> frozenset[str]:
        """Also the instances it had to leave before, if any other is left."""
        request = transfer.request
        all_of_them = avoid | request.avoid
        if transfer.source in avoid:
            request.avoid |= {transfer.source}
        return all_of_them if self._reach.elsewhere(request, all_of_them) else avoid

    def failed(self, transfer: DecodeTransfer, reason: str, now: float, actions: list[ev.Action]) -> None:
        """It failed at its target. Another is looked for, later if there is none."""
        transfer.excluded.add(transfer.target)
        self.remember(transfer, reason, now)
        if reason == OTHER_MODEL:  # no failure of the request
            self.withdraw(transfer, now)
            return
        transfer.failures += 1
        if all(instance.id in transfer.excluded for instance in self._reach.decoders(transfer, now)):
            transfer.not_before = now + self.config.retry_s * 2**transfer.failures  # no other is left: let one recover
        self.withdraw(transfer, now)
        if transfer.failures >= self.config.max_failures:
            self.give_up(transfer, reason, now, actions)
        elif transfer.paired and not transfer.early:  # the KV of a pair is not kept once it was taken
            self.prefill_again(transfer, "kv_lost", now, actions)

    def remember(self, transfer: DecodeTransfer, reason: str, now: float) -> None:
        """What this failure says of its two instances or of their link."""
        if reason == OTHER_MODEL:
            if {transfer.source, transfer.target} <= self._roster.instances.keys():  # else it was of an earlier run
                self._incompatible.met(transfer.source, transfer.target, now)
        elif reason not in ("refused", "kv_lost"):  # else the engine answered, so the link is good
            self._links.failed((transfer.source, transfer.target), transfer, now)

    def withdraw(self, transfer: DecodeTransfer, now: float) -> None:
        """Back to waiting. A one-shot choice of instance stays, unless that instance failed it."""
        keeps = self._one_shot and transfer.target not in transfer.excluded
        if transfer.target and not keeps:
            instance = self._roster.instances.get(transfer.target)
            if instance is not None:
                instance.remove(transfer.request.id)
            transfer.target = ""
            self._queue.changed(transfer.request.model)
        if transfer.paired:
            transfer.overdue_at = math.inf  # its prefill was aborted with it
        self._queue.advance(transfer, On.UNDONE, now)

    def give_up(self, transfer: DecodeTransfer, reason: str, now: float, actions: list[ev.Action]) -> None:
        request = transfer.request
        self.forget(request.id)
        self.free(transfer, now, actions)
        figures: dict[str, Figure] = {"failures": transfer.failures, "waited_s": now - transfer.stage.first_at}
        actions.append(ev.GiveUp(request, Decision("place", reason, request.id, now, figures)))


class KvReleases:
    """KV that prefill instances keep and nobody needs: released until they confirm it, then left to its lease.

    `timeout_s`: until a confirmation is overdue; `tries`: how often the same release is sent. All have the same
    time-out and are in the order of their clock: the first is due first.
    """

    def __init__(self, timeout_s: float, tries: int) -> None:
        self._timeout_s = timeout_s
        self._tries = tries
        self._asked: dict[Kept, tuple[float, int]] = {}  # since when, and how often so far

    def __len__(self) -> int:
        return len(self._asked)

    def __iter__(self) -> Iterator[Kept]:
        return iter(self._asked)

    def ask(self, request_id: str, instance_id: str, now: float, actions: list[ev.Action]) -> None:
        """Release it, unless that is under way."""
        if (request_id, instance_id) not in self._asked:
            self._asked[request_id, instance_id] = (now, 1)
            actions.append(ev.FreeKv(request_id, instance_id))

    def over(self, request_id: str, instance_id: str) -> None:
        """It is freed, or needed again: the same request is prefilled there once more."""
        self._asked.pop((request_id, instance_id), None)

    def gone(self, instance_id: str) -> None:
        """The instance is gone, with all that it kept."""
        self._asked = {kept: asked for kept, asked in self._asked.items() if kept[1] != instance_id}

    def overdue(self, now: float, actions: list[ev.Action]) -> None:
        while self._asked and self.next_at() <= now:
            kept, (_, tries) = next(iter(self._asked.items()))
            del self._asked[kept]
            if tries < self._tries:
                self._asked[kept] = (now, tries + 1)  # behind all others
                actions.append(ev.FreeKv(*kept))
            else:
                actions.append(ev.LeftToLease(*kept, tries))

    def next_at(self) -> float:
        """When the next confirmation is overdue; infinite when none is expected."""
        since = next(iter(self._asked.values()), (math.inf, 0))[0]
        return since + self._timeout_s
