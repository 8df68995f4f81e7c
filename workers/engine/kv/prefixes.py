"""Prefixes that other engines have cached, the side that reuses them (MFS' stage 1). `lender` is the other side.

Before a prompt is queued, engines to which a link is up are asked how much of it they have cached: all of them but
those that said a moment ago what they have, and had none of what is missing here (`digests`). The one that saves the
most time lends it, if the copy takes less than computing: by the measured bandwidth of the link, after what the
lender's transfer daemon says is queued there, against the measured cost of prefills here (`KvCosts`). What is not
measured yet is no reason against it. The KV is copied into reserved blocks, which then belong to the prefix cache like
those of prompts that were computed here. What is lost on the way or late, or evicted before the prompt runs, is
computed. Prompts that begin alike borrow once, and a few different ones at a time.

Where steps can wait for layers (`EngineScheduler.overlaps_copies`) the prompt is queued with its first layer and
computed while the others come (`ComingPrefix`); elsewhere it is queued when the copy has ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from controller.core.kv_links import BorrowedKv, KvMoved
from controller.core.steps import ComingPrefix, LayersCame, PrefixEnded, Seq, Step
from workers.engine.engine import Engine, names_of
from workers.engine.kv.digests import Digest
from workers.engine.kv.lender import TOKEN_BYTES, tokens_as_bytes
from workers.engine.kv.links import NOT_THE_LINKS_FAULT, KvLink, Links
from workers.engine.kv.store import KvStore
from workers.engine.kv.transfer import KvConnection, KvTraffic
from workers.engine.kv.wire import KvTransferError

LEAST_PATIENCE_S = 1.0  # for a layer: busy machines are late
ASK_S = 0.2  # an engine that does not answer within this is not asked to lend
DEFECT = "transfer_failed"  # a copy ended early for no reason that a transfer knows
MOST_FETCHES = 8  # prefixes that are asked for at a time; beyond, prompts are computed
log = logging.getLogger(__name__)


@dataclass(slots=True)
class BorrowedTraffic:
    """Since the start. `asked`: questions who has a prompt; `spared`: engines that were not asked about one, since they
    had nothing of it a moment before. `tokens`: that came from other engines; `lost`: copies that ended early;
    `dearer`: prefixes that were not copied since computing took less."""

    asked: int = 0
    spared: int = 0
    borrowed: int = 0
    tokens: int = 0
    lost: int = 0
    dearer: int = 0
    seconds: float = 0.0


class _Answer(NamedTuple):
    """What an engine has cached, in tokens, and how long its link is taken."""

    tokens: int
    queue_s: float
    link: KvLink


@dataclass(slots=True)
class _Copy:
    """One copy: `link` to the lender, `prompt` as it is sent. `patience_s`: how long a layer may take, and all of
    them twice that; `limits` are both, with their seconds, counted anew while its prompt waits for none of it, but not
    beyond `ends_by`. `alone`: no other copy used the link meanwhile. `came`: tokens, at the end all of them or none;
    `layers`: of them so far. `step_id`: that computes the prompt, None before it has begun. `moved`: its figures, once
    it has ended."""

    coming: ComingPrefix
    link: KvLink
    prompt: bytes
    patience_s: float
    limits: tuple[tuple[asyncio.Timeout, float], ...] = ()
    ends_by: float = math.inf  # on the event loop's clock
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # the prompt need not wait any longer
    ended: bool = False
    alone: bool = True
    came: int = 0
    layers: int = 0
    step_id: int | None = None
    moved: KvMoved | None = None


class PrefixBorrower:
    """`least_tokens`: prompts with fewer uncached ones than this are computed without asking anybody; 0: all are.
    `limit_s`: of one copy, also of one that is held meanwhile. `about`: what a source is told of a sequence
    (`KvConnection.pull`)."""

    def __init__(
        self,
        engine: Engine,
        store: KvStore,
        links: Links,
        least_tokens: int,
        limit_s: float,
        about: Callable[[Seq], Mapping[str, Any]] = lambda seq: {},
    ) -> None:
        self.traffic = BorrowedTraffic()
        self._kv = KvTraffic()
        self._engine, self._store, self._links = engine, store, links
        self._least, self._limit_s, self._about = least_tokens, limit_s, about
        # By the hash of what prompts must have in common to wait; the result is False if it was cancelled.
        self._fetching: dict[Hashable, asyncio.Future[bool]] = {}
        self._digests: dict[KvLink, Digest] = {}  # of links that are up
        self._digest_comes: set[KvLink] = set()  # links on which it is on its way
        self.moving: list[_Copy] = []  # copies under way; without any, no step concerns this
        self._copying: dict[str, asyncio.Task[None]] = {}  # by the id of the prompt, which waits for it or overlaps it
        # By the id of the prompt, until it has ended: what was copied for it, None while it comes.
        self._borrowed: dict[str, BorrowedKv | None] = {}

    @property
    def received_bytes(self) -> int:
        return self._kv.received_bytes

    async def fetch(self, seq: Seq) -> None:
        """Return when as much of its prompt as possible is cached here, or when it can be computed while it is copied
        (`seq.coming`). Raises nothing: what fails is computed. `forget` must follow once the prompt has ended.

        Prompts that begin alike would copy the same KV: the first of them borrows, and the others wait for it and look
        again. They borrow too what is then missing, but only if something came, or if the first was cancelled.
        """
        blocks = self._engine.scheduler.blocks
        if not self._least or not blocks.caching or seq.token_ids is None or seq.branch_of:
            return
        before = -1  # tokens that were cached here when the last fetch that was waited for began
        while (here := blocks.cached_tokens(seq)) > before and (start := self._start_of_missing(seq, here)) is not None:
            other = self._fetching.get(start)
            if other is None:
                if len(self._fetching) < MOST_FETCHES:
                    await self._fetch_first(start, seq, here)
                return
            if await asyncio.shield(other):
                before = here

    def _start_of_missing(self, seq: Seq, here: int) -> Hashable | None:
        """The hash of the prompt up to the fewest tokens that are borrowed: prompts that have it in common can use each
        other's copies. None if less than that is missing."""
        size = self._engine.config.block_size
        last = (here + max(self._least, size)) // size - 1
        if seq.tokens - here < self._least or last >= len(seq.block_hashes):
            return None
        return seq.block_hashes[last]

    async def _fetch_first(self, start: Hashable, seq: Seq, here: int) -> None:
        """Fetch, while prompts that start alike wait for the end of the copy."""
        ended = self._fetching[start] = asyncio.get_running_loop().create_future()

        def over(tried: bool) -> None:
            del self._fetching[start]
            ended.set_result(tried)

        try:
            copy = await self._lent(seq, here, start)
        except BaseException as error:  # cancelled if its client went away: another one goes on
            over(not isinstance(error, asyncio.CancelledError))
            raise
        if copy is None:
            over(True)
            return
        self._borrowed[seq.id] = None
        copying = self._copying[seq.id] = asyncio.get_running_loop().create_task(self._run(seq.id, copy, over))
        try:
            await copy.begun.wait()
        except asyncio.CancelledError:
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)
            raise
        seq.coming = None if copy.ended else copy.coming

    def borrowed(self, seq: Seq) -> BorrowedKv | None:
        """What was copied for this prompt, once the copy has ended; None if nothing was."""
        return self._borrowed.get(seq.id)

    def forget(self, seq: Seq) -> None:
        """The prompt has ended, or its client went away: its copy ends too, unless all of it is here."""
        self._borrowed.pop(seq.id, None)
        copying = self._copying.get(seq.id)
        if copying is not None and (seq.coming is None or seq.coming.layers < self._store.layers):
            copying.cancel()

    def close(self) -> None:
        for copying in self._copying.values():
            copying.cancel()

    def began(self, step: Step) -> None:
        """Call when a step begins."""
        for copy in self.moving:
            if any(chunk.seq.coming is copy.coming for chunk in step.chunks):
                copy.step_id = step.id

    def _computes(self, copy: _Copy) -> int | None:
        """The layer of the prompt that is computed or waits; None before it has begun."""
        layer = None
        if copy.step_id is not None:
            layer = min(self._engine.layers_done(copy.step_id), self._store.layers - 1)
        if (layer or 0) < copy.coming.layers:  # nothing waits: a copy that the daemon holds meanwhile is not late
            _extend(copy.limits, copy.ends_by)
        return layer

    def _may_have(self, start: Hashable) -> list[KvLink]:
        """Links to engines that may have the block with this hash."""
        up, now = self._links.up(), asyncio.get_running_loop().time()
        self._digests = {link: self._digests[link] for link in up if link in self._digests}
        size = self._engine.config.block_size
        found = []
        for link in up:
            digest = self._digests.get(link)
            if digest is None or not digest.is_fresh(now) or digest.has(start, size):
                found.append(link)
        self.traffic.asked += len(found)
        self.traffic.spared += len(up) - len(found)
        return found

    async def _lent(self, seq: Seq, here: int, start: Hashable) -> _Copy | None:
        """Ask who has it, and reserve blocks for it. None if nobody lends enough. `here`: how many of its tokens are
        cached here; `start`: the hash of the last block that a lender must have at least."""
        size = self._engine.config.block_size
        asked = array("q", seq.token_ids or ())
        prompt = tokens_as_bytes(asked)
        answers = await asyncio.gather(*(self._held(link, prompt, seq.salt) for link in self._may_have(start)))
        best, most_s, there = None, -math.inf, here
        for answer in answers:
            full = min(answer.tokens, seq.tokens - 1) // size * size  # at least one token is left to compute
            saved_s = self._saved_s(here, full, answer)
            if full - here >= self._least and saved_s <= 0:
                answer.link.health.doubted()  # without copies nothing else would show that it is faster by now
            if full - here >= self._least and (saved_s, full) > (most_s, there):
                best, most_s, there = answer, saved_s, full
        self.traffic.dearer += best is not None and most_s <= 0
        if best is None or most_s <= 0:
            return None
        held = min(best.tokens, seq.tokens - 1)
        prefix = Seq(self._engine.next_id(names_of(seq)[0]), seq.arrival, there, 1, token_ids=asked[:there])
        prefix.salt, prefix.due = seq.salt, seq.due
        if not self._engine.borrow(prefix):
            return None
        # One token more than is wanted, since a lender too leaves one to compute.
        sent = prompt[: (held + 1) * TOKEN_BYTES]
        patience_s = max(LEAST_PATIENCE_S, self._computing_s(here, there) or self._limit_s)
        return _Copy(ComingPrefix(prefix), best.link, sent, patience_s)

    def _computing_s(self, here: int, there: int) -> float | None:
        """Of the prompt's tokens between these two; None before anything was measured."""
        costs = self._engine.scheduler.costs
        if costs is None or (whole_s := costs.recompute_s(there)) is None:
            return None
        return whole_s - (costs.recompute_s(here) or 0.0)

    def _saved_s(self, here: int, there: int, answer: _Answer) -> float:
        """Seconds by which the copy of these tokens is faster than computing them, infinite if either is unknown."""
        computing_s, health = self._computing_s(here, there), answer.link.health
        if computing_s is None or not health.bandwidth_bytes_s:
            return math.inf
        moving_s = (there - here) * self._store.layers * self._store.token_bytes / health.bandwidth_bytes_s
        return computing_s - (2 * (health.latency_s or 0.0) + answer.queue_s + moving_s)

    async def _run(self, name: str, copy: _Copy, over: Callable[[bool], None]) -> None:
        """`name`: of the prompt; `over`: called at the end, with False if it was cancelled."""
        prefix, tried = copy.coming.seq, True
        whole_s = min(self._limit_s, 2 * copy.patience_s)
        copy.ends_by = asyncio.get_running_loop().time() + self._limit_s
        try:
            async with asyncio.timeout(whole_s) as whole, asyncio.timeout(copy.patience_s) as of_a_layer:
                copy.limits = ((of_a_layer, copy.patience_s), (whole, whole_s))
                with self._beside_others(copy), copy.link.moving():
                    await self._copy(copy)
        except TimeoutError:
            told = "a prefix of %d tokens took longer than %g s, or a layer of it longer than %g s"
            log.warning(told, prefix.tokens, whole_s, copy.patience_s)
            copy.link.health.doubted()
        except asyncio.CancelledError:
            tried = False
            raise
        finally:
            self._count(copy)
            copy.ended = True
            if copy.moved is not None and name in self._borrowed:
                self._borrowed[name] = BorrowedKv(copy.link.peer.id, copy.moved)
            del self._copying[name]
            over(tried)
            copy.begun.set()
            self._engine.handle(PrefixEnded(prefix, copy.came))

    def _count(self, copy: _Copy) -> None:
        """One that came whole counts as such, whatever was missing after its last layer."""
        if copy.came and copy.moved is not None:
            self.traffic.borrowed += 1
            self.traffic.tokens += copy.moved.tokens
            self.traffic.seconds += copy.moved.seconds
        else:
            self.traffic.lost += 1

    @contextmanager
    def _beside_others(self, copy: _Copy) -> Iterator[None]:
        """Copies that share a link meanwhile are not `alone`: none of them shows how fast it is."""
        for other in self.moving:
            if other.link is copy.link:
                other.alone = copy.alone = False
        self.moving.append(copy)
        try:
            yield
        finally:
            self.moving = [other for other in self.moving if other is not copy]

    def _layers_came(self, copy: _Copy, layers: int) -> None:
        _extend(copy.limits[:1], copy.ends_by)  # while a layer comes in good time the copy goes on
        copy.layers = layers
        if layers == self._store.layers:
            copy.came = copy.coming.seq.tokens
        if self._engine.scheduler.overlaps_copies:
            self._engine.handle(LayersCame(copy.coming, layers))
            copy.begun.set()

    async def _held(self, link: KvLink, prompt: bytes, salt: bytes) -> _Answer:
        connection: KvConnection | None = None
        with self._asking_for_digest(link) as wanted:
            try:
                async with asyncio.timeout(ASK_S):
                    connection, _ = await link.take()
                    held = await connection.holds(prompt, salt, ASK_S, digest=wanted)
            except (KvTransferError, TimeoutError):
                if connection is not None:
                    connection.close()
                return _Answer(0, 0.0, link)
            except BaseException:
                if connection is not None:
                    connection.close()
                raise
            link.give_back(connection)
            if held.digest is not None:
                self._digests[link] = held.digest
        return _Answer(held.tokens, held.queue_s, link)

    @contextmanager
    def _asking_for_digest(self, link: KvLink) -> Iterator[bool]:
        """Whether a question should ask for it too: prompts that ask at the same time need it once."""
        known = self._digests.get(link)
        fresh = known is not None and known.is_fresh(asyncio.get_running_loop().time())
        if fresh or link in self._digest_comes:
            yield False
            return
        self._digest_comes.add(link)
        try:
            yield True
        finally:
            self._digest_comes.discard(link)

    async def _copy(self, copy: _Copy) -> None:
        link, seq = copy.link, copy.coming.seq
        loop = asyncio.get_running_loop()
        began = loop.time()
        connection: KvConnection | None = None
        try:
            connection, _ = await link.take()
            overlaps = self._engine.scheduler.overlaps_copies
            about = {"unit": self._links.me, "batch": names_of(seq)[1], "overlaps": overlaps, **self._about(seq)}
            came, computes = partial(self._layers_came, copy), partial(self._computes, copy)
            await connection.borrow(seq, copy.prompt, self._store, self._kv, about, came, computes)
        except KvTransferError as error:
            copy.moved = _moved(copy, connection, loop.time() - began, error.reason, str(error))
            what = "came without its figures" if copy.came else "was lost"
            log.warning("a prefix of %d tokens from %s %s: %s", seq.tokens, link.peer.id, what, error)
            if error.reason not in NOT_THE_LINKS_FAULT:
                link.health.failed(str(error), loop.time(), connection.received if connection is not None else 0)
            if connection is not None:
                connection.close()
            return
        except Exception:  # the request can do without the copy: whatever is wrong must not fail it
            copy.moved = _moved(copy, connection, loop.time() - began, DEFECT)
            log.exception("a prefix of %d tokens from %s was lost", seq.tokens, link.peer.id)
            if connection is not None:
                connection.close()
            return
        except BaseException:  # out of time, or nobody waits for it any more
            copy.moved = _moved(copy, connection, loop.time() - began, "timeout")
            if connection is not None:
                connection.close()
            raise
        link.give_back(connection)
        copy.moved = _moved(copy, connection, loop.time() - began)
        link.health.moved(connection.received, copy.moved.moving_s if copy.alone else 0.0)


def _moved(copy: _Copy, connection: KvConnection | None, seconds: float, reason: str = "", error: str = "") -> KvMoved:
    """Of a copy that has ended. `reason`: why it ended early; after its last layer only figures can be missing, and
    nothing is lost."""
    seq, received = copy.coming.seq, 0 if connection is None else connection.received
    if copy.came:
        reason = error = ""
    turns = {} if connection is None else connection.turns
    return KvMoved(
        received, copy.layers, seq.tokens - seq.cached, seq.cached, seconds, reason=reason, error=error, **turns
    )


def _extend(limits: Iterable[tuple[asyncio.Timeout, float]], ends_by: float) -> None:
    """They count from now on, unless they are over, and end by then at the latest."""
    now = asyncio.get_running_loop().time()
    for limit, seconds in limits:
        if not limit.expired():
            limit.reschedule(min(now + seconds, ends_by))
