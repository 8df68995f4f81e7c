"""Forks of a workflow at a step: branches that go on from the KV that its answer left at an engine.

A step with `checkpoint` leaves it there under a lease. `POST /v1/workflows/{id}/fork` names the branches; each request
of a branch is sent where the checkpoint is, or computed elsewhere if that is expected to be sooner. After the last
branch of all forks of the step the engine frees it. Whatever is lost (the engine, the lease, Redis), branches are
computed like other requests.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from api.openai.in_flight import InFlightRequest
from api.openai.protocol.errors import ApiError
from api.openai.protocol.workflow_bodies import NewFork
from controller.core.decisions import Decision, Figure
from controller.core.types import Request
from controller.dispatch import Scheduler
from controller.dispatch.shadow_state import ShadowInstance
from workers.backends.base import Backend, EngineError, NotSupported
from workers.forks import (
    MOST_FORKS,
    KvCheckpoint,
    OtherFork,
    TooManyForks,
    end_branch,
    find_fork,
    forget_checkpoints,
    fork_name,
    fork_of,
    join_branch,
    keep_checkpoint,
    lose_checkpoint,
    open_fork,
    read_checkpoint,
    renew_step,
)
from workers.live import LiveUnavailable, Talks
from workers.log_lines import RepeatedLine

log = logging.getLogger(__name__)

TOLD_S = 1.0  # within which another gateway tells the checkpoint of a step that it has just answered
LOOK_S = 0.05
AGAIN_S = 1.0  # after Redis did not take where a checkpoint is
MOST_UNTOLD = 1_000  # checkpoints that Redis has not taken yet; further ones are told once, or not at all
AT_ONCE = 10  # calls that tell a checkpoint for the first time; a gateway has 100 connections to Redis
READ_S = 0.25  # longest that Redis may take for a request of a branch; then it is computed
Spawn = Callable[[Coroutine[Any, Any, None]], object]
Name = tuple[str, str, str]  # tenant, workflow and step


class Fork(NamedTuple):
    """`new`: it was not there before. `open`: those of its branches that have not ended. `held`: the KV of the step is
    at its engine."""

    id: str
    new: bool
    branches: tuple[str, ...]
    open: tuple[str, ...]
    held: bool
    lease_s: float


@dataclass(slots=True, eq=False)
class _Untold:
    """A checkpoint that Redis has not taken. `ends`: its lease, monotonic seconds. `waits`: it has been tried, or too
    many others were. `told`: set when it needs not be waited for any more."""

    found: KvCheckpoint
    ends: float
    waits: bool = False
    told: asyncio.Event = field(default_factory=asyncio.Event)


class Placed(NamedTuple):
    """Where a request of a branch goes. `avoid`: all other instances, if its checkpoint is worth it. `shared`: tokens
    of its prompt that need not be computed at `instance`."""

    decision: Decision
    avoid: frozenset[str] = frozenset()
    branch_of: str = ""
    shared: int = 0
    instance: str = ""


class Forks:
    """`board` None: a gateway that runs alone has none."""

    def __init__(self, backends: Mapping[str, Backend], scheduler: Scheduler, spawn: Spawn) -> None:
        self.board: Talks | None = None
        self._backends = backends
        self._scheduler = scheduler
        self._spawn = spawn
        self._untold: dict[Name, _Untold] = {}
        self._trying = 0  # for the first time
        self._telling = False
        self._away = False  # and logged
        self._not_freed = RepeatedLine(log, "checkpoints of a cancelled workflow were not freed: %s")
        self._not_told = RepeatedLine(log, "the lease of a checkpoint was renewed or lost, and nobody told: %s")

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def ended(self, in_flight: InFlightRequest) -> None:
        """A step has been answered: it is told where its checkpoint is, if its engine keeps any."""
        backend, step = self._backends.get(in_flight.instance), in_flight.step
        if self.board is None or step is None or backend is None or not backend.capabilities.checkpoints:
            return
        tokens = in_flight.prompt_tokens + in_flight.output_tokens - 1  # the last one's KV is computed with the next
        found = KvCheckpoint(in_flight.instance, in_flight.request.id, tokens, in_flight.checkpoint_s)
        name = (in_flight.request.tenant, step.workflow, step.key)
        each = _Untold(found, time.monotonic() + found.lease_s)
        if (older := self._untold.get(name)) is not None:
            each.told = older.told
        if older is not None or len(self._untold) < MOST_UNTOLD:
            self._untold[name] = each
        if self._trying < AT_ONCE:
            self._trying += 1
            self._spawn(self._try(self.board, name, each))
        else:
            self._wait(self.board, name, each)

    async def _try(self, board: Talks, name: Name, each: _Untold) -> None:
        try:
            taken = await self._tell(board, name, each)
        finally:
            self._trying -= 1
        if not taken:
            self._wait(board, name, each)

    def _wait(self, board: Talks, name: Name, each: _Untold) -> None:
        """Until its turn comes, unless there are too many, the step has another one, or nobody needs it any more."""
        if self._untold.get(name) is not each:
            return
        each.waits = True
        if not self._telling:
            self._telling = True
            self._spawn(self._tell_waiting(board))

    async def _tell_waiting(self, board: Talks) -> None:
        """One after the other until none waits, with a pause when Redis does not take one. Were each told by a task of
        its own, they would take all connections of the gateway to a Redis that hangs."""
        pauses, told = self._away, 0
        try:
            while True:
                if pauses:
                    await asyncio.sleep(AGAIN_S)
                waiting = [(name, each) for name, each in self._untold.items() if each.waits]
                if not waiting:
                    break
                pauses = False
                for name, each in waiting:
                    if self._untold.get(name) is not each:
                        continue
                    if each.ends <= time.monotonic():
                        self._over(name, each)
                    elif not pauses:
                        pauses = not await self._tell(board, name, each)
                        told += not pauses
            if self._away:
                log.info("no checkpoint is left that Redis was not told of: it has taken %d later", told)
        finally:
            self._telling = self._away = False

    async def _tell(self, board: Talks, name: Name, each: _Untold) -> bool:
        """Whether Redis has taken it."""
        over = True
        try:
            await board.run(keep_checkpoint(*name, each.found, each.ends - time.monotonic()))
        except LiveUnavailable as error:
            over = False
            if not self._away and self._untold.get(name) is each:
                self._away = True
                log.info("Redis does not take where checkpoints are, and is tried again every %g s: %s", AGAIN_S, error)
        finally:
            if over:
                self._over(name, each)
        return over

    def _over(self, name: Name, each: _Untold) -> None:
        if self._untold.get(name) is each:
            del self._untold[name]
            each.told.set()

    # ---- forks ----------------------------------------------------------------------------------------------------

    async def open(self, tenant: str, workflow: str, asked: NewFork) -> Fork:
        """A new one, or that which has its id and open branches. Raises ApiError."""
        board = self._board()
        fork_id = asked.id or f"fork-{secrets.token_hex(12)}"
        fork = fork_name(workflow, fork_id)
        try:
            if asked.id and (known := await self._known(board, tenant, fork, asked)) is not None:
                return known
            found = await self._told(board, tenant, workflow, asked.step)
            if found is None:
                told = "step: this workflow has no step with this key whose checkpoint is still kept."
                raise ApiError("not_found", told, param="step")
            held = await self._renew(found)
            new = await board.run(open_fork(tenant, fork, asked.step, asked.branches, found, gone=held is False))
            if not new:  # the same one was asked for at the same time
                known = await self._known(board, tenant, fork, asked)
                if known is None:
                    raise _away()
                return known
        except LiveUnavailable:
            raise _away() from None
        except OtherFork as error:
            told = (
                f"{error.field}: this workflow has a fork with this id, of another step or with more or less branches."
            )
            raise ApiError("fork_exists", told, param=error.field, final=True) from None
        except TooManyForks:
            told = f"branches: this tenant has {MOST_FORKS} forks with open branches, which is the most."
            raise ApiError("rate_limit_exceeded", told, param="branches", retry_after_s=60.0) from None
        names = _branches(fork, range(asked.branches))
        return Fork(fork_id, True, names, names, held is True, found.lease_s)

    async def _known(self, board: Talks, tenant: str, fork: str, asked: NewFork) -> Fork | None:
        """One that has been asked for before. Raises LiveUnavailable and OtherFork."""
        known = await board.run(find_fork(tenant, fork, asked.step, asked.branches))
        if known is None:
            return None
        held = None if known.found is None else await self._renew(known.found)
        if known.found is not None and held is not None:
            await board.run(renew_step(tenant, known.found) if held else lose_checkpoint(tenant, fork))
        branches, still_open = _branches(fork, range(asked.branches)), _branches(fork, known.open)
        return Fork(asked.id, False, branches, still_open, held is True, known.lease_s)

    async def _told(self, board: Talks, tenant: str, workflow: str, step: str) -> KvCheckpoint | None:
        """Where the checkpoint of a step is. A client may ask before the gateway that answered the step has told: this
        one knows that it has not, another one is given `TOLD_S`. Raises LiveUnavailable."""
        if (untold := self._untold.get((tenant, workflow, step))) is not None:
            try:
                async with asyncio.timeout(TOLD_S):
                    await untold.told.wait()
            except TimeoutError:
                raise LiveUnavailable("Redis has not taken where the checkpoint is") from None
        found = await board.run(read_checkpoint(tenant, workflow, step))
        for _ in range(round(TOLD_S / LOOK_S)):
            if found is not None:
                break
            await asyncio.sleep(LOOK_S)
            found = await board.run(read_checkpoint(tenant, workflow, step))
        return found

    async def end(self, tenant: str, branch: str) -> None:
        """A branch is over; after the last one of all forks of its checkpoint this is freed. Raises ApiError."""
        try:
            known, last = await self._board().run(end_branch(tenant, branch))
        except LiveUnavailable:
            raise _away() from None
        if not known:
            raise ApiError("not_found", "This tenant has no open branch with this id.")
        if last is not None:
            await self._free(last)

    def forget(self, tenant: str, workflow: str) -> None:
        """The workflow was cancelled: its checkpoints are freed, in the background. What stays for want of Redis ends
        with its lease."""
        for name in [each for each in self._untold if each[:2] == (tenant, workflow)]:
            self._over(name, self._untold[name])
        if self.board is not None:
            self._spawn(self._forget(self.board, tenant, workflow))

    async def _forget(self, board: Talks, tenant: str, workflow: str) -> None:
        try:
            gone = await board.run(forget_checkpoints(tenant, workflow))
        except LiveUnavailable as error:
            self._not_freed.write(error)
            return
        for each in gone:
            await self._free(each)

    def _board(self) -> Talks:
        if self.board is None:
            raise ApiError("workflows_unavailable", "This gateway runs alone and keeps no workflows.")
        return self.board

    async def _renew(self, found: KvCheckpoint) -> bool | None:
        """Whether the checkpoint is at its engine; None if that did not say."""
        backend = self._backends.get(found.instance)
        if backend is None:
            return None
        try:
            return await backend.renew_kv(found.request_id, found.lease_s)
        except (EngineError, NotSupported) as error:
            log.info("the lease of a checkpoint at %s was not renewed: %s", found.instance, error)
            return None

    async def _free(self, found: KvCheckpoint) -> None:
        backend = self._backends.get(found.instance)
        if backend is None:
            return
        try:
            await backend.free_kv([found.request_id])
        except (EngineError, NotSupported) as error:  # its lease will end it
            log.info("a checkpoint at %s was not freed: %s", found.instance, error)

    # ---- requests of branches -------------------------------------------------------------------------------------

    async def find(self, tenant: str, branch: str) -> KvCheckpoint | None:
        """None: there is no checkpoint to go on from, or that cannot be read now."""
        if self.board is None or not branch:
            return None
        try:
            async with asyncio.timeout(READ_S):
                found = await self.board.run(join_branch(tenant, branch))
        except (LiveUnavailable, TimeoutError):
            return None
        if found is not None:
            self._spawn(self._renewed(self.board, tenant, branch, found))
        return found

    async def _renewed(self, board: Talks, tenant: str, branch: str, found: KvCheckpoint) -> None:
        """Its lease begins again. If the engine does not have it any more (evicted, or started again), the scheduler
        must not count with it for further branches."""
        held = await self._renew(found)
        if held is None:
            return
        try:
            await board.run(renew_step(tenant, found) if held else lose_checkpoint(tenant, fork_of(branch)))
        except LiveUnavailable as error:
            self._not_told.write(error)

    def place(self, request: Request, found: KvCheckpoint | None, now: float) -> Placed:
        """Go on from the checkpoint, or compute all of it where that costs less: seconds until its first token, by
        each instance's own measured prefills and the prompts that wait there, and the seconds that a device computes
        for it, which others wait for."""
        if found is None:
            return Placed(Decision("fork", "checkpoint_lost", request.id, now, {}))
        lane = self._scheduler.dispatcher.lanes.get(request.model)
        instances = {} if lane is None else {name: each for name, each in lane.instances.items() if each.takes}
        there = instances.pop(found.instance, None)
        if there is None:
            return Placed(Decision("fork", "checkpoint_lost", request.id, now, {"instance": found.instance}))
        prompt = request.prompt_tokens
        shared = min(found.tokens, prompt - 1)
        new = prompt - shared
        fork_s = _cost_s(there, new, new * (new + 2 * shared))
        again_s = min((_cost_s(each, prompt, prompt**2) for each in instances.values()), default=math.inf)
        figures: dict[str, Figure] = {"instance": found.instance, "tokens": shared, "fork_s": round(fork_s, 6)}
        if instances:
            figures["again_s"] = round(again_s, 6)
        if again_s < fork_s:
            return Placed(Decision("fork", "sooner_again", request.id, now, figures))
        decision = Decision("fork", "from_checkpoint", request.id, now, figures)
        return Placed(decision, frozenset(instances), found.request_id, shared, found.instance)


def _cost_s(there: ShadowInstance, tokens: int, squares: int) -> float:
    """Until the first token, with all that waits there, and of the device."""
    until_s = there.latency.prefill_sums(there.waiting_new + tokens, there.waiting_squares + squares)
    return until_s + there.latency.prefill_sums(tokens, squares)


def _branches(fork: str, numbers: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"{fork}-{number}" for number in numbers)


def _away() -> ApiError:
    return ApiError("workflows_unavailable", "Workflows cannot be forked now. Try again shortly.", retry_after_s=1.0)
