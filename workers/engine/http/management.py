"""All endpoints other than generation: models, health, tokenizer, metrics, sleep and pause."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict
from typing import Any

from controller.core.errors import ConfigError
from controller.core.types import Role
from controller.engine import PreemptivePrefill
from workers.engine import fields
from workers.engine.config import ServerConfig
from workers.engine.engine import Engine
from workers.engine.errors import HttpError
from workers.engine.http.asgi import Exchange, Handler
from workers.engine.http.generate import Generator
from workers.engine.http.guard import FleetGuard
from workers.engine.http.requests import RequestRules, messages_of, token_ids
from workers.engine.metrics import CONTENT_TYPE, SLEEP_STATES
from workers.engine.scheduler_choice import scheduler_for
from workers.engine.weights.manager import LoadFailed, Source, WeightManager
from workers.http.details import LIVE

logger = logging.getLogger("workers.engine")
VERSION = "0.1.0+slackline"
PAUSE_MODES = ("abort", "wait", "keep")
WAKE_TAGS = ("weights", "kv_cache", "scheduling")


class Management:
    """Sleep and pause need the fleet's token. They are always available; vLLM has them in its development mode only."""

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        served: RequestRules,
        generator: Generator,
        weights: WeightManager,
        guard: FleetGuard,
    ) -> None:
        self._engine = engine
        self._weights = weights
        self._config = config
        self._guard = guard
        self._tokenizer = served.tokenizer
        self._generator = generator
        self._created = int(time.time())
        self._role = config.role
        self._moving = asyncio.Lock()  # one sleep or wake-up at a time
        self._absent: set[str] = set()  # what a sleeping engine released; "scheduling" at level 0

    def routes(self) -> dict[str, dict[str, Handler]]:
        ping: dict[str, Handler] = {"GET": self.health, "POST": self.health}
        guarded = self._guard
        return {
            LIVE: {"GET": self.live},
            "/health": {"GET": self.health},
            "/ping": ping,
            "/version": {"GET": self.version},
            "/server_info": {"GET": self.server_info},
            "/load": {"GET": self.load},
            "/role": {"POST": guarded(self.set_role)},
            "/metrics": {"GET": self.metrics},
            "/v1/models": {"GET": self.models},
            "/tokenize": {"POST": self.tokenize},
            "/detokenize": {"POST": self.detokenize},
            "/sleep": {"POST": guarded(self.sleep)},
            "/wake_up": {"POST": guarded(self.wake_up)},
            "/is_sleeping": {"GET": self.is_sleeping},
            "/pause": {"POST": guarded(self.pause)},
            "/resume": {"POST": guarded(self.resume)},
            "/is_paused": {"GET": self.is_paused},
            "/abort_requests": {"POST": guarded(self.abort_requests)},
            "/reset_prefix_cache": {"POST": guarded(self.reset_prefix_cache)},
        }

    async def health(self, exchange: Exchange) -> None:
        """Return 200 unless the engine has failed, also while it is paused or asleep."""
        await exchange.answer(b"", status=503 if self._engine.failed else 200)

    async def live(self, exchange: Exchange) -> None:
        """Return 200 while the process runs and accepts connections, even if the engine has failed."""
        await exchange.answer(b"ok\n", 200, b"text/plain; charset=utf-8")

    async def version(self, exchange: Exchange) -> None:
        await exchange.reply({"version": VERSION})

    async def server_info(self, exchange: Exchange) -> None:
        """Return the configuration: sizes, and the latency that it emulates or predicts (seconds, tokens)."""
        config, profile = self._config, self._config.profile
        known = profile and {"id": profile.id, "model": profile.model, "latency": profile.coefficients._asdict()}
        await exchange.reply(
            {
                "version": VERSION,
                "model": config.model,
                "role": self._role,
                "executor": "torch" if config.torch else "emulated",
                "tensor_parallel": config.torch.ranks if config.torch else 1,
                "tokenizer": self._tokenizer.name,
                "batching": self._engine.scheduler.batching.name,
                "engine": asdict(config.engine),
                "preemption": self._preemption(),
                "swapping": self._swapping(),
                "profile": known,
            }
        )

    async def set_role(self, exchange: Exchange, body: fields.Body) -> None:
        """Run the scheduler of another role, if the role chose the present one. Idempotent.

        409 unless the engine is idle: it has no requests and keeps no KV for others."""
        role = fields.string(body, "role")
        if role not in list(Role):
            raise HttpError(f"role must be one of {', '.join(Role)}", "role")
        if role != self._role:
            self._take_role(Role(role))
        await exchange.reply({"role": self._role, "batching": self._engine.scheduler.batching.name})

    def _take_role(self, role: Role) -> None:
        engine, config = self._engine, self._config
        if config.by_stage:
            if not engine.scheduler.idle or engine.streams:
                raise HttpError("the engine is not idle", status=409)
            if engine.scheduler.paused:
                raise HttpError("the engine is paused or sleeps", status=409)
            latency = config.profile.coefficients if config.profile else None
            try:
                engine.exchange(scheduler_for(role, engine.scheduler, latency, config.deadlines))
            except ConfigError as error:
                raise HttpError(f"the engine keeps its scheduler: {error}", "role", status=400) from error
            logger.info("takes the role %s, %s batching", role, engine.scheduler.batching.name)
        self._role = role

    async def load(self, exchange: Exchange) -> None:
        await exchange.reply({"server_load": self._generator.in_flight})

    async def metrics(self, exchange: Exchange) -> None:
        await exchange.answer(self._engine.metrics.render(), content_type=CONTENT_TYPE)

    async def models(self, exchange: Exchange) -> None:
        card = {
            "id": self._config.model,
            "object": "model",
            "created": self._created,
            "owned_by": "slackline",
            "root": self._root(),
            "parent": None,
            "max_model_len": self._config.engine.max_model_len,
            "permission": [],
        }
        await exchange.reply({"object": "list", "data": [card]})

    def _swapping(self) -> dict[str, Any] | None:
        """KV of evicted sequences in host memory: blocks, choices by reason, the last one, and what was measured."""
        swaps, costs = self._engine.scheduler.swaps, self._engine.scheduler.costs
        if swaps is None or costs is None:
            return None
        return {
            "blocks": swaps.room,
            "used": swaps.used,
            "out": swaps.counts.out,
            "back": swaps.counts.back,
            "choices": dict(swaps.counts.choices),
            "last": swaps.last and swaps.last._asdict(),
            "measured": costs.figures(),
        }

    def _preemption(self) -> dict[str, Any] | None:
        """Settings of the preemptive scheduler and figures of its rounds so far (seconds)."""
        scheduler = self._engine.scheduler
        if not isinstance(scheduler, PreemptivePrefill):
            return None
        return asdict(scheduler.preemption) | {"rounds": asdict(scheduler.rounds)}

    def _root(self) -> str:
        config = self._config
        if config.torch is not None:
            return str(config.torch.folder)
        return config.profile.id if config.profile else config.model

    async def tokenize(self, exchange: Exchange) -> None:
        body = await exchange.json()
        if "messages" in body:
            tokens = self._tokenizer.encode_chat(messages_of(body))
        elif isinstance(body.get("prompt"), str):
            tokens = self._tokenizer.encode(body["prompt"], fields.boolean(body, "add_special_tokens", True))
        else:
            raise HttpError("prompt must be a string (or give messages)", "prompt")
        answer = {"count": len(tokens), "max_model_len": self._config.engine.max_model_len, "tokens": tokens}
        if fields.boolean(body, "return_token_strs"):
            answer["token_strs"] = [self._tokenizer.decode([token]) for token in tokens]
        await exchange.reply(answer)

    async def detokenize(self, exchange: Exchange) -> None:
        tokens = (await exchange.json()).get("tokens")
        if not isinstance(tokens, list):
            raise HttpError("tokens must be a list of token ids", "tokens")
        await exchange.reply({"prompt": self._tokenizer.decode(token_ids(tokens, "tokens", self._tokenizer))})

    # ---- sleep and pause ------------------------------------------------------------------------------------------

    async def sleep(self, exchange: Exchange, body: fields.Body) -> None:
        """Put the engine to sleep. Level 0 only pauses. Levels 1 and 2 also release the KV cache, so that sequences
        that stay are computed again; level 1 keeps a copy of the weights in host memory, level 2 keeps none. Requests
        that arrive meanwhile are queued.
        """
        level = int(_choice(exchange, "level", ("0", "1", "2"), "1"))
        mode = _choice(exchange, "mode", PAUSE_MODES, "abort")
        with self._engine.metrics.moves.labels("sleep").track_inprogress():
            async with self._moving:
                if level and (self._weights.busy or self._weights.store.sending):
                    raise HttpError("weights are being loaded or sent", status=409)
                await self._stop(mode, release_kv=level > 0)
                if level:
                    level = await self._release_weights(level)
                self._fall_asleep(level)
        await exchange.reply({"status": "sleeping", "level": level})

    async def _release_weights(self, level: int) -> int:
        """Release the weights; returns the level that was reached. Raises HttpError if they cannot be released; then
        the engine has its state from before."""
        await self._engine.device_free()
        try:
            await self._weights.release(keep_host_copy=level == 1)
        except LoadFailed as error:
            if not self._weights.store.present:
                self._fall_asleep(2)
            elif not self._absent:
                self._awaken()
            raise HttpError(str(error), status=503) from error
        return 1 if self._weights.store.has_host_copy else 2

    def _fall_asleep(self, level: int) -> None:
        """Store the sleep level. A sleeping engine that is paused (level 0) stays asleep."""
        if level or not self._absent:
            self._absent = {"weights", "kv_cache"} if level else {"scheduling"}
            self._engine.metrics.sleep_state(SLEEP_STATES[level])

    def begin_warm(self) -> None:
        """Start as a warm spare: the process runs and has no weights yet."""
        self._engine.pause(release_kv=True)
        self._fall_asleep(2)

    async def weights_came(self) -> None:
        """Wake up after /weights/load, which also brought everything else back, unless the weights were released again
        meanwhile."""
        async with self._moving:
            if self._weights.store.present:
                self._absent.clear()
                self._awaken()

    async def wake_up(self, exchange: Exchange, body: fields.Body) -> None:
        """Wake up everything, or the parts named by `tags`; the engine runs once all parts are back. Tags that are not
        asleep change nothing.

        Weights come from the copy in host memory, else from the disk; 503 if both fail. The memory of the KV cache is
        allocated with them, whichever tag is named; 503 if it is used by others. The engine then stays asleep.
        """
        named = exchange.query().get("tags")
        for tag in named or ():
            if tag not in WAKE_TAGS:
                raise HttpError(f"tags must be among {', '.join(WAKE_TAGS)}, got {tag!r}", "tags")
        with self._engine.metrics.moves.labels("wake").track_inprogress():
            async with self._moving:
                tags = sorted(self._absent) if named is None else named
                if "weights" in tags and "weights" in self._absent:
                    await self._restore_weights()
                self._absent.difference_update(tags)
                if not self._absent:
                    self._awaken()
        await exchange.reply({"status": "sleeping" if self._absent else "awake", "tags": tags})

    async def _restore_weights(self) -> None:
        if self._weights.loading:
            raise HttpError("weights are being loaded already", status=409)
        store = self._weights.store
        sources = [Source("host")] if store.has_host_copy or store.shared_copy else []
        if not await self._weights.load([*sources, Source("disk")]):
            raise HttpError(f"the weights could not be loaded: {self._weights.attempts[-1].error}", status=503)

    async def is_sleeping(self, exchange: Exchange) -> None:
        """Return whether the engine is asleep; as in vLLM, also true if it is only paused."""
        await exchange.reply({"is_sleeping": self._engine.scheduler.paused})

    async def pause(self, exchange: Exchange, body: fields.Body) -> None:
        """Pause until /resume. Mode `keep` freezes running requests and queues new ones; `abort` and `wait` end running
        requests and refuse new ones."""
        mode = _choice(exchange, "mode", PAUSE_MODES, "abort")
        if mode != "keep":
            self._engine.refusing = True
        await self._stop(mode, release_kv=False)
        await exchange.reply({"status": "paused"})

    async def resume(self, exchange: Exchange, body: fields.Body) -> None:
        if self._absent:
            raise HttpError("the engine is asleep: POST /wake_up", status=409)
        self._awaken()
        await exchange.reply({"status": "resumed"})

    async def is_paused(self, exchange: Exchange) -> None:
        await exchange.reply({"is_paused": self._engine.scheduler.paused})

    async def abort_requests(self, exchange: Exchange, body: fields.Body) -> None:
        """Abort requests by the ids that clients received or sent; an empty list aborts all."""
        names = fields.strings(body, "request_ids", most=100_000)
        self._engine.abort_all(names)
        await exchange.reply({"status": "aborted"})

    async def reset_prefix_cache(self, exchange: Exchange, body: fields.Body) -> None:
        self._engine.reset_cache()
        await exchange.reply({"success": True})

    async def _stop(self, mode: str, release_kv: bool) -> None:
        if mode == "wait":
            await self._engine.drained()
        self._engine.pause(release_kv)
        if mode == "abort":
            self._engine.abort_all()

    def _awaken(self) -> None:
        self._engine.metrics.sleep_state(SLEEP_STATES[0])
        self._engine.refusing = False
        self._engine.resume()


def _choice(exchange: Exchange, name: str, valid: tuple[str, ...], default: str) -> str:
    value = exchange.query().get(name, [default])[-1]
    if value not in valid:
        raise HttpError(f"{name} must be one of {', '.join(valid)}, got {value!r}", name)
    return value
