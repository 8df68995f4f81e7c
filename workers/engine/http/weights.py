"""`/weights`: the state of the weights, loads from a source, and sending to another engine of the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from workers.engine import fields
from workers.engine.errors import HttpError
from workers.engine.http.asgi import Exchange, Handler
from workers.engine.http.guard import FleetGuard
from workers.engine.weights.manager import KINDS, Digesting, Identity, LoadFailed, Source, WeightManager

MOST_SOURCES = 8


class WeightEndpoints:
    """Loading and sending need the fleet's token. `awake` is called once the weights are loaded."""

    def __init__(self, manager: WeightManager, guard: FleetGuard, awake: Callable[[], Awaitable[None]]) -> None:
        self._manager = manager
        self._guard = guard
        self._awake = awake
        self._task: asyncio.Task[bool] | None = None  # a load in the background

    def routes(self) -> dict[str, dict[str, Handler]]:
        return {
            "/weights": {"GET": self.state},
            "/weights/load": {"POST": self._guard(self.load)},
            "/weights/send": {"POST": self._guard(self.send)},
        }

    async def state(self, exchange: Exchange) -> None:
        await exchange.reply(self._described())

    async def load(self, exchange: Exchange, body: fields.Body) -> None:
        """Try the sources in order until one gives whole weights. Returns 200 then, 502 if none did, and 409 while
        another load is in progress.

        With `background` true it returns 202 at once, and `GET /weights` shows the result. `order` is a name for the
        load, so that a caller that was interrupted sees whether the newest load is its own.
        """
        sources, order = _sources(body), fields.string(body, "order")
        if self._manager.busy:
            raise HttpError("weights are already being loaded or released", status=409)
        if fields.boolean(body, "background") and self._manager.claim(order):
            self._task = asyncio.create_task(self._run(sources, order))
            return await exchange.reply({"loaded": False, **self._described()}, 202)
        loaded = await self._run(sources, order)
        await exchange.reply({"loaded": loaded, **self._described()}, 200 if loaded else 502)

    async def _run(self, sources: list[Source], order: str) -> bool:
        loaded = await self._manager.load(sources, order)
        if loaded:
            await self._awake()
        return loaded

    async def send(self, exchange: Exchange, body: fields.Body) -> None:
        """Send the weights to the engine at `host` and `port`. 200: sending has begun; the body lists the tensors. 202:
        their digests are still being computed, `digested` bytes so far; call again. 409: this engine has no weights, or
        others than requested."""
        host, port = fields.string(body, "host"), fields.integer(body, "port", low=1, high=65535)
        if not host or port is None:
            raise HttpError("host and port are required: the receiver's address", "host" if not host else "port")
        nonce = fields.string(body, "nonce")
        if not nonce:
            raise HttpError("nonce is required: the receiver's name for this transfer", "nonce")
        wanted = Identity(fields.string(body, "model"), fields.string(body, "checkpoint"))
        for field in ("model", "checkpoint"):
            if not getattr(wanted, field):
                raise HttpError("model and checkpoint are required: the weights to send", field)
        if self._manager.busy:
            raise HttpError("weights are being loaded or released", status=409)
        held = self._manager.store.identity
        if self._manager.store.present and not held.meets(wanted):
            raise HttpError(f"this engine holds {held}, not {wanted}", status=409)
        try:
            tensors = await self._manager.store.send(host, port, nonce)
        except Digesting as digesting:
            return await exchange.reply({"digested": digesting.nbytes, "bytes": self._manager.store.nbytes}, 202)
        except LoadFailed as error:
            raise HttpError(str(error), status=409) from error
        size = self._manager.store.nbytes
        await exchange.reply({"tensors": tensors, "bytes": size, "checkpoint": held.checkpoint})

    def _described(self) -> dict[str, object]:
        manager = self._manager
        return {
            "state": manager.state,
            "order": manager.order,
            "bytes": manager.store.nbytes,
            "model": manager.store.identity.model,
            "checkpoint": manager.store.identity.checkpoint,
            "host_copy": manager.store.has_host_copy or manager.store.shared_copy,
            "attempts": [attempt.to_json() for attempt in manager.attempts],
            "present_s": manager.present_s,
            "held_s": manager.held_s,
        }


def _sources(body: fields.Body) -> list[Source]:
    given = body.get("sources")
    if not isinstance(given, list) or not 1 <= len(given) <= MOST_SOURCES:
        raise HttpError(f"sources must be a list of 1 to {MOST_SOURCES} objects", "sources")
    found = []
    for index, item in enumerate(given):
        where = f"sources[{index}]"
        if not isinstance(item, dict) or item.get("kind") not in KINDS:
            raise HttpError(f"{where}.kind must be one of {', '.join(KINDS)}", f"{where}.kind")
        url = fields.string(item, "url")
        if item["kind"] == "engine" and not url.startswith(("http://", "https://")):
            raise HttpError(f"{where}.url must be the url of the engine to copy from", f"{where}.url")
        found.append(Source(item["kind"], url))
    return found
