"""Moves KV on a thread of its own, beside vLLM's worker, whose steps never wait for it.

The worker gives orders and asks what has ended, between its steps; all else happens on the thread's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from controller.core.kv_links import KvMoved
from workers.engine.kv.wire import KvTransferError
from workers.flowd.client import FlowClient
from workers.vllm_connector.blocks import CacheBlocks
from workers.vllm_connector.figures import KvFigures, since
from workers.vllm_connector.places import Places
from workers.vllm_connector.plan import Kept, KvLoad, KvOrders, PromptOffer
from workers.vllm_connector.pull import drop, pull
from workers.vllm_connector.settings import ConnectorSettings
from workers.vllm_connector.source import FULL, KvSource

START_S = 10.0
DEFECT = "transfer_failed"  # for the record, of a load that failed for no reason of its own
MOST_SAID = 200  # characters of why KV did not come, in a header of the answer
log = logging.getLogger(__name__)


class TransfersEnded(NamedTuple):
    """Since the last question. `lost`: blocks of loads that failed, whose requests are in `loaded` too."""

    sent: set[str]
    loaded: set[str]
    lost: set[int]


class StepClock:
    """How long vLLM's steps have computed so far, for those who wait beside them. Any thread may ask."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._busy_s = 0.0
        self._began: float | None = None  # the step that computes now

    def begun(self) -> None:
        with self._lock:
            self._began = self._clock()

    def ended(self) -> None:
        """Idempotent."""
        with self._lock:
            self._busy_s, self._began = self._so_far(), None

    def busy_s(self) -> float:
        with self._lock:
            return self._so_far()

    def _so_far(self) -> float:
        return self._busy_s + (0.0 if self._began is None else self._clock() - self._began)


class Transfers:
    """`wall`: the clock of deadlines, seconds. Raises OSError if its address cannot be listened at."""

    def __init__(self, settings: ConnectorSettings, blocks: CacheBlocks, wall: Callable[[], float] = time.time) -> None:
        self._settings, self._blocks, self._wall = settings, blocks, wall
        self._figures, self._told = KvFigures(), KvFigures()
        self._lock = threading.Lock()
        self._ended = TransfersEnded(set(), set(), set())
        self._moved: dict[str, dict[str, Any]] = {}
        self._steps = StepClock()
        self._pulls: dict[str, asyncio.Task[str]] = {}
        self._dropping: set[asyncio.Task[None]] = set()
        self._kv_usage = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="slackline-kv", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(START_S)
        except BaseException:
            self._stop_loop()
            raise

    async def _start(self) -> None:
        self._places: defaultdict[tuple[str, int], Places] = defaultdict(Places)  # by peer: each waits for its own
        self._client = FlowClient(self._settings.flow_socket) if self._settings.flow_socket else None
        if self._client is not None:
            self._client.start()
        self._source = KvSource(self._settings, self._blocks, self._client, self._figures, self._sent)
        await self._source.start()

    # ---- for the worker, on any thread ------------------------------------------------------------------------------

    def order(self, orders: KvOrders) -> None:
        """Begin what is ordered with a step, which computes from now until `ended`. Returns at once."""
        self._steps.begun()
        with self._lock:  # and not on the loop: the step may have the answer's first token
            self._moved |= {secret: _not_moved("refused", why)._asdict() for secret, why in orders.refused}
        self._loop.call_soon_threadsafe(self._begin, orders)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """These requests are over: their loads end, and count as loaded."""
        names = [name for name in request_ids if name in self._pulls]
        if names:
            self._loop.call_soon_threadsafe(self._cancel, names)

    def ended(self) -> TransfersEnded:
        """Asked at the end of a step."""
        self._steps.ended()
        with self._lock:
            found, self._ended = self._ended, TransfersEnded(set(), set(), set())
        return found

    def moved(self) -> dict[str, dict[str, Any]]:
        """Figures (KvMoved) of the loads that arrived or failed since the last question, and of offers that were
        refused, by their secrets. Those of a load come no later than the word that it has ended."""
        with self._lock:
            found, self._moved = self._moved, {}
        return found

    def figures(self) -> dict[str, float]:
        """Those that have grown since the last question, by how much."""
        last, self._told = self._told, replace(self._figures)
        return since(last, self._told)

    def close(self) -> None:
        """Ends all transfers. Idempotent."""
        if self._loop.is_closed():
            return
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(START_S)
        self._stop_loop()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        if not self._loop.is_running():
            self._loop.close()

    async def _close(self) -> None:
        self._source.close()
        if self._client is not None:
            self._client.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    # ---- on the loop ------------------------------------------------------------------------------------------------

    def _begin(self, orders: KvOrders) -> None:
        self._kv_usage = self._source.kv_usage = orders.kv_usage
        for kept in orders.kept:
            self._keep(kept)
        for load in orders.loads:
            task = self._pulls[load.request_id] = self._loop.create_task(self._pull(load))
            task.add_done_callback(partial(self._pulled, load))
        for offer in orders.unwanted:
            self._unwanted(offer)

    def _keep(self, kept: Kept) -> None:
        if self._blocks.holds(kept.blocks):
            self._source.keep(kept)
        else:  # never, as long as both halves mean the same cache
            log.error("the blocks of %s are none of this cache", kept.request_id)
            self._sent(kept.request_id)

    def _sent(self, request_id: str) -> None:
        with self._lock:
            self._ended.sent.add(request_id)

    async def _pull(self, load: KvLoad) -> str:
        """Why it did not arrive (`KvTransferError.reason`); empty if it did."""
        ordered = began = time.monotonic()
        computed_s = self._steps.busy_s()

        def note(moved: KvMoved) -> None:
            """`began`: of the transfer itself, once it has its place."""
            took_s, busy_s = time.monotonic() - began, self._steps.busy_s() - computed_s
            with self._lock:
                self._moved[load.offer.secret] = moved._replace(seconds=took_s, busy_s=busy_s)._asdict()

        try:
            async with self._places[load.offer.host, load.offer.port].place(load.due) as leave:
                began, computed_s = time.monotonic(), self._steps.busy_s()
                if not self._blocks.holds(load.blocks):
                    raise KvTransferError("its blocks are none of this cache", "corrupt")
                due_in_s = None if load.due is None else load.due - self._wall()
                pressed = self._kv_usage >= FULL
                found = await pull(load, self._blocks, self._settings.token, due_in_s, leave, pressed=pressed)
        except KvTransferError as error:
            log.warning("the KV of %s is computed here: %s (%s)", load.request_id, error, error.reason)
            note(_not_moved(error.reason, str(error)))
            return error.reason
        except Exception:  # a defect, which must cost nobody's answer
            log.exception("the KV of %s is computed here", load.request_id)
            note(KvMoved(reason=DEFECT))
            return DEFECT
        self._figures.received += 1
        self._figures.received_bytes += found.bytes
        self._figures.receiving_seconds += time.monotonic() - ordered
        note(found)
        return ""

    def _pulled(self, load: KvLoad, task: asyncio.Task[str]) -> None:
        """Also of a task that was cancelled before it ran. The KV of a load that failed is of no use to anybody: its
        request is computed here. That of a cancelled one may be, since its gateway may try another server; and that of
        a refused one, which another server may be loading."""
        self._pulls.pop(load.request_id, None)
        lost = not task.cancelled() and bool(task.result())
        if lost:
            self._figures.failed += 1
            if task.result() != "refused":
                self._unwanted(load.offer)
        with self._lock:
            self._ended.loaded.add(load.request_id)
            if lost:
                self._ended.lost.update(load.blocks)

    def _unwanted(self, offer: PromptOffer) -> None:
        task = self._loop.create_task(self._drop(offer))
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    async def _drop(self, offer: PromptOffer) -> None:
        with suppress(KvTransferError, OSError, asyncio.IncompleteReadError):
            await drop(offer, self._settings.token)

    def _cancel(self, request_ids: Iterable[str]) -> None:
        for name in request_ids:
            if (task := self._pulls.get(name)) is not None:
                task.cancel()


def _not_moved(reason: str, why: str) -> KvMoved:
    """`why`: as far as a header may have it."""
    return KvMoved(reason=reason, error=why[:MOST_SAID].encode("ascii", "replace").decode())
