"""Disaggregation: both sides of a KV transfer, for the engine's HTTP interface.

The protocol is that of vLLM's pull connector. A request with `kv_transfer_params.do_remote_decode` is prefilled. Its
response has one token and an offer, and its KV is kept for a lease. A request with the offer (`do_remote_prefill`)
reserves blocks, pulls the KV and continues from the token that the other engine sampled, which is the first one that
the client gets. With `early` the offer is sent in the headers of the response, as soon as the prompt is nearly computed
(`PrefillEndings`); KV that is pulled then is sent while it is computed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil, isfinite
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from controller.core.kv_links import KvMoved
from controller.core.steps import NEARLY_COMPUTED, FinishReason, Landed, Release, Seq, Step
from workers.engine import fields
from workers.engine.engine import Engine, names_of
from workers.engine.errors import HttpError
from workers.engine.kv.lender import PrefixLender
from workers.engine.kv.links import Links
from workers.engine.kv.prefixes import PrefixBorrower
from workers.engine.kv.progress import KvProgress
from workers.engine.kv.server import KvServer
from workers.engine.kv.store import KvStore
from workers.engine.kv.transfer import NOBODY, KvTraffic, Listener, Offer
from workers.engine.kv.turns import LayerStarts, TurnsConfig
from workers.engine.kv.wire import KvTransferError
from workers.engine.text.streams import Stream
from workers.flowd.client import FlowClient
from workers.http.fleet_proof import address

FIELD = "kv_transfer_params"
SHORT_OF_MEMORY = 0.9  # share of the KV blocks in use, from which on transfers are not held
UNKNOWN = 0  # the first token, while it has not been sampled yet
log = logging.getLogger(__name__)


class Disaggregation:
    """KV transfers of one engine. It listens on `host` and offers the address `reached_at`. `lease_s`: how long KV is
    kept for another engine to pull it; `timeout_s`: of one pull; `flows`: whom to ask before sending (None: nobody);
    `borrow_tokens`: `PrefixBorrower.least_tokens`."""

    def __init__(
        self,
        engine: Engine,
        store: KvStore,
        token: str,
        host: str,
        *,
        reached_at: str = "",
        lease_s: float = 30.0,
        timeout_s: float = 30.0,
        flows: FlowClient | None = None,
        borrow_tokens: int = 0,
    ) -> None:
        self._engine = engine
        self._host = host
        self._token = token
        self._reached_at = reached_at or host
        self._lease_s = lease_s
        self._kept: dict[str, tuple[Seq, asyncio.TimerHandle]] = {}
        self._begun: dict[str, Seq] = {}  # prefills in progress
        self._progress = KvProgress(engine.layers_done)
        self._endings = PrefillEndings(engine, store.layers)
        engine.on_start = self._step_began
        self.expired = self.freed = 0
        self._flows = flows
        layers = None if flows is None else LayerStarts(flows, self._progress, store.layers)
        turns = TurnsConfig(flows, self._short_of_memory, self._renew, layers=layers)
        self.lender = PrefixLender(engine, store, turns)
        self.server = KvServer(store, token, self._find, self.release, self._progress, turns, self.lender)
        self.links = Links(store, token, self.traffic, timeout_s, self._about)
        self.borrows = borrow_tokens > 0
        self.prefixes = PrefixBorrower(engine, store, self.links, borrow_tokens, timeout_s, self._about)

    def expose(self, registry: CollectorRegistry) -> None:
        """Add the metrics of KV transfers, under Slackline's names, since vLLM has none."""
        held = self.server.turns.traffic
        for name, text, read in (
            ("kv_sent_bytes", "KV bytes other engines pulled from here.", lambda: self.traffic.sent_bytes),
            ("kv_received_bytes", "KV bytes pulled from other engines.", lambda: self.traffic.received_bytes),
            ("kv_early_bytes", "Of them, sent while their prompt was computed.", lambda: self.traffic.early_bytes),
            (
                "kv_receiving_seconds",
                "Time of the pulls that ended well, without holding.",
                lambda: self.traffic.receiving_s,
            ),
            ("kv_sent", "Prompts whose KV another engine has taken.", lambda: self.traffic.sent),
            ("kv_received", "Prompts taken over.", lambda: self.traffic.received),
            ("kv_failed", "Transfers that ended early.", lambda: self.traffic.failed),
            ("kv_held_seconds", "Time in which transfers from here were held.", lambda: held.held_s),
            ("kv_promotions", "Levels by which transfers from here rose.", lambda: held.promotions),
            ("kv_unscheduled", "Transfers from here that the daemon did not schedule.", lambda: held.unscheduled),
            ("kv_kept", "Prompts whose KV waits to be taken.", lambda: self.kept),
            ("kv_expired", "Prompts whose KV nobody took within the lease.", lambda: self.expired),
            ("kv_borrow_questions", "Engines asked who has a prefix.", lambda: self.prefixes.traffic.asked),
            ("kv_borrow_questions_spared", "Not asked: had none of it.", lambda: self.prefixes.traffic.spared),
            ("kv_borrowed", "Prefixes that other engines lent.", lambda: self.prefixes.traffic.borrowed),
            ("kv_borrowed_tokens", "Tokens of them.", lambda: self.prefixes.traffic.tokens),
            ("kv_borrowed_bytes", "KV bytes received of prefixes.", lambda: self.prefixes.received_bytes),
            ("kv_borrowed_seconds", "Time to copy them.", lambda: self.prefixes.traffic.seconds),
            ("kv_borrows_dearer", "Prefixes not copied: computing took less.", lambda: self.prefixes.traffic.dearer),
            ("kv_borrows_lost", "Prefixes whose copy ended early.", lambda: self.prefixes.traffic.lost),
            ("kv_lent", "Prefixes lent to other engines.", lambda: self.lender.traffic.lent),
            ("kv_lent_bytes", "KV bytes sent of prefixes.", lambda: self.lender.traffic.bytes),
            ("kv_freed", "Prompts whose KV was given up because somebody said so.", lambda: self.freed),
        ):
            Gauge(f"slackline_{name}", text, registry=registry).set_function(read)

    async def start(self, port: int) -> None:
        await self.server.start(self._host, port)
        self.server.names.add(address(*self.at))
        if self._flows is not None:
            self._flows.start()
        log.info("KV on %s:%d", self._host, self.server.port)

    def close(self) -> None:
        self._endings.close()
        self.prefixes.close()
        self.links.close()
        self.server.close()
        if self._flows is not None:
            self._flows.close()

    @property
    def at(self) -> tuple[str, int]:
        """Host and port at which other engines reach this one."""
        return self._reached_at, self.server.port

    def _short_of_memory(self) -> bool:
        return self._engine.scheduler.blocks.usage >= SHORT_OF_MEMORY

    @property
    def kept(self) -> int:
        return len(self._kept)

    @property
    def traffic(self) -> KvTraffic:
        return self.server.traffic

    # ---- prefill side ----------------------------------------------------------------------------------------------

    def begin(self, seq: Seq) -> None:
        """Call before the prefill is queued. `end` must follow in any case."""
        self._begun[seq.id] = seq
        self._endings.begin(seq)

    async def ending(self, stream: Stream) -> bool:
        """Return True once the prompt is nearly computed, so that it may be offered early; False if it ended before."""
        return await self._endings.near(stream)

    def _step_began(self, step: Step) -> None:
        self._endings.began(step, list(self._progress.began(step)))
        if self.prefixes.moving:
            self.prefixes.began(step)

    def early_offer(self, seq: Seq) -> dict[str, Any]:
        """The offer of a prompt that is still being prefilled, so without its first token."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.links.me,
            "remote_request_id": seq.id,
            "remote_host": self._reached_at,
            "remote_port": self.server.port,
            "remote_num_tokens": seq.prompt_tokens,
            "remote_proof": Offer.proof_of(self._token, *self.at, seq.id),
        }

    def has_room(self, seq: Seq) -> bool:
        """Whether the context has room after the first token; otherwise nothing is left to decode."""
        return seq.prompt_tokens + 1 < self._engine.config.max_model_len

    def offer(self, seq: Seq) -> dict[str, Any] | None:
        """The offer for the decode engine, whose KV is then kept; None if nothing is left to decode."""
        ended = seq.finish is not FinishReason.LENGTH or seq.output_tokens != 1
        if ended or seq.token_ids is None or not self.has_room(seq):
            self._engine.handle(Release(seq))
            return None
        if seq.id in self._begun:  # otherwise it has been pulled already
            timer = asyncio.get_running_loop().call_later(self._lease_s, self._expire, seq)
            self._kept[seq.id] = (seq, timer)
        expires = {"remote_blocks_expiry_time": time.time() + self._lease_s, "first_token": int(seq.token_ids[-1])}
        return self.early_offer(seq) | expires

    def end(self, seq: Seq) -> None:
        """Call when the prefill was answered or given up. KV that was not offered is released."""
        self._begun.pop(seq.id, None)
        self._endings.forget(seq)
        self._progress.forget(seq)
        if seq.id not in self._kept:
            self._engine.handle(Release(seq))

    def release(self, seq: Seq) -> None:
        """Release the KV, which was pulled or is no longer needed."""
        kept = self._kept.pop(seq.id, None)
        if kept is not None:
            kept[1].cancel()
        self._begun.pop(seq.id, None)
        self._engine.handle(Release(seq))

    def free(self, names: Iterable[str]) -> int:
        """Release the KV kept for these requests, by the ids that clients sent or received; returns the number. Unknown
        ids are ignored."""
        wanted = set(names)
        found = [seq for seq, _ in self._kept.values() if wanted.intersection(names_of(seq))]
        for seq in found:
            self.release(seq)
        self.freed += len(found)
        return len(found)

    def _expire(self, seq: Seq) -> None:
        self.expired += 1
        log.warning("no engine pulled the KV of %s within %g s", seq.id, self._lease_s)
        self.release(seq)

    def _renew(self, seq: Seq) -> None:
        """Its transfer is held: its lease begins again."""
        if (kept := self._kept.get(seq.id)) is not None:
            kept[1].cancel()
            self._kept[seq.id] = (seq, asyncio.get_running_loop().call_later(self._lease_s, self._expire, seq))

    def _find(self, name: str) -> Seq | None:
        kept = self._kept.get(name)
        return kept[0] if kept is not None else self._begun.get(name)

    # ---- decode side -----------------------------------------------------------------------------------------------

    def _about(self, seq: Seq) -> dict[str, Any]:
        """What the source is told: the first token's deadline, which the gateway sent, and whether memory is short."""
        due_in_s = seq.due - self._engine.now()
        due = {"due_in_s": due_in_s} if isfinite(due_in_s) else {}
        return due | ({"pressed": True} if self._short_of_memory() else {})

    def reserve(self, stream: Stream, offer: Offer) -> None:
        """Reserve blocks for its KV. Raises HttpError; then nothing is reserved."""
        seq = stream.seq
        if offer.tokens != seq.prompt_tokens:
            raise HttpError(f"the offer has {offer.tokens} tokens, the prompt {seq.prompt_tokens}", FIELD)
        if seq.token_ids is None or seq.max_tokens < 2:
            raise HttpError("nothing is left to decode: max_tokens must be at least 2", "max_tokens")
        seq.token_ids.append(UNKNOWN if offer.first_token is None else offer.first_token)
        seq.output_tokens = 1
        seq.first_token_at = seq.scheduled_at = self._engine.now()
        self._engine.reserve(stream)

    async def take_over(self, stream: Stream, offer: Offer, listener: Listener = NOBODY) -> KvMoved:
        """Call after `reserve`. Pulls the KV and returns once the sequence decodes here. Raises HttpError; then its
        blocks are released."""
        seq, busy_s = stream.seq, self._engine.busy_s()
        try:
            moved, first_token = await self._pull(stream, offer, listener)
        except KvTransferError as error:
            self._engine.abort(seq)
            moved = error.moved._replace(busy_s=self._engine.busy_s() - busy_s)
            extra = {"kv": moved._asdict()}
            raise HttpError(f"KV transfer failed ({error.reason}): {error}", FIELD, status=502, extra=extra) from error
        except asyncio.CancelledError:
            self._engine.abort(seq)
            raise
        if stream.finish is not None:  # aborted since the end of the transfer
            raise _aborted()
        if seq.token_ids is not None:
            seq.token_ids[-1] = first_token
        del seq.block_hashes[seq.prompt_tokens // self._engine.config.block_size :]  # computed with the placeholder
        stream.push(first_token, None)
        self._engine.handle(Landed(seq))
        return moved._replace(busy_s=self._engine.busy_s() - busy_s)

    async def _pull(self, stream: Stream, offer: Offer, listener: Listener) -> tuple[KvMoved, int]:
        """Pull, or stop as soon as the sequence is aborted, so that nothing is written into released blocks."""
        pulling = asyncio.ensure_future(self.links.pull(offer, stream.seq, listener))
        over = asyncio.ensure_future(stream.ready())
        try:
            await asyncio.wait((pulling, over), return_when=asyncio.FIRST_COMPLETED)
            if stream.finish is not None:
                raise _aborted()
            return await pulling
        finally:
            pulling.cancel()
            over.cancel()
            await asyncio.gather(pulling, over, return_exceptions=True)


def _aborted() -> HttpError:
    return HttpError("the request was aborted during its KV transfer", status=503)


def wants_remote_decode(body: fields.Body) -> bool:
    return fields.boolean(fields.mapping(body, FIELD), "do_remote_decode")


def wants_early_offer(body: fields.Body) -> bool:
    return fields.boolean(fields.mapping(body, FIELD), "early")


def offer_in(body: fields.Body) -> Offer | None:
    """The offer in a decode request; None without one. Raises HttpError naming the field."""
    params = fields.mapping(body, FIELD)
    if not fields.boolean(params, "do_remote_prefill"):
        return None
    try:
        return Offer(
            host=fields.string(params, "remote_host"),
            port=_required(params, "remote_port", 1, 65535),
            request=fields.string(params, "remote_request_id"),
            tokens=_required(params, "remote_num_tokens", 1),
            first_token=fields.integer(params, "first_token", low=0, high=fields.INT64 - 1),
            engine=fields.string(params, "remote_engine_id"),
            proof=fields.string(params, "remote_proof"),
        )
    except HttpError as error:
        raise HttpError(f"{FIELD}: {error}", f"{FIELD}.{error.param}") from None


def _required(params: fields.Body, name: str, low: int, high: int = fields.INT64 - 1) -> int:
    value = fields.integer(params, name, low=low, high=high)
    if value is None:
        raise HttpError(f"{name} is missing", name)
    return value


LOOK_S = 0.002  # a running step is polled, since nothing reports progress by layer


@dataclass(slots=True)
class _Prefill:
    """A prefill in progress. `step`: id of its last step, once that has begun."""

    near: asyncio.Event = field(default_factory=asyncio.Event)
    step: int | None = None


class PrefillEndings:
    """Tells when a prompt is nearly computed, so that its decode engine can be chosen and begin to pull KV.

    Where steps are bounded (continuous batching, chunks) that is when the last step of the prefill begins: KV of the
    earlier steps moves while it runs. An engine that preempts computes a whole prompt in one step. At its beginning the
    choice would be as early as at dispatch, and the decode engine would hold blocks during the whole prefill and all
    its suspensions. So there it is when three quarters of the layers are computed, and only while the step runs: a
    suspended step, or one asked to suspend, is not announced before it resumes. The price is overlap: more than a
    quarter of the step's time is left for the transfer only after that point.

    `layers`: of the model. Resumed steps are observed here; the caller reports started ones through `began`.
    """

    def __init__(self, engine: Engine, layers: int) -> None:
        self._engine = engine
        self._nearly = ceil(NEARLY_COMPUTED * layers)
        self._prefills: dict[str, _Prefill] = {}
        self._next_look: asyncio.TimerHandle | None = None  # one step computes at a time
        engine.on_resume = self._watch

    def close(self) -> None:
        self._stop_looking()

    def begin(self, seq: Seq) -> None:
        """Call before the prefill is queued. `forget` follows."""
        self._prefills[seq.id] = _Prefill()

    def forget(self, seq: Seq) -> None:
        self._prefills.pop(seq.id, None)

    async def near(self, stream: Stream) -> bool:
        """Return True once the prompt is nearly computed; False if it ended before."""
        near = self._prefills[stream.seq.id].near
        waits = [asyncio.ensure_future(near.wait()), asyncio.ensure_future(stream.ready())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return stream.finish is None

    def began(self, step: Step, last: list[Seq]) -> None:
        """Call when a step begins. `last`: sequences whose prefill ends with it."""
        for seq in last:
            if seq.id in self._prefills:
                self._prefills[seq.id].step = step.id
        self._watch(step.id)

    # ---- looking ---------------------------------------------------------------------------------------------------

    def _watch(self, step_id: int) -> None:
        """Poll a step that began or resumed."""
        self._stop_looking()
        if any(not prefill.near.is_set() for prefill in self._of(step_id)):
            self._look(step_id)

    def _look(self, step_id: int) -> None:
        if self._engine.computing != step_id:
            return  # it has ended, or is suspended and will be watched again
        passed = self._nearly if self._engine.scheduler.whole_prompts else 0
        if self._engine.layers_done(step_id) < passed:
            self._next_look = asyncio.get_running_loop().call_later(LOOK_S, self._look, step_id)
            return
        for prefill in self._of(step_id):
            prefill.near.set()

    def _stop_looking(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None

    def _of(self, step_id: int) -> list[_Prefill]:
        return [prefill for prefill in self._prefills.values() if prefill.step == step_id]
