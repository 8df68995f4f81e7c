"""The ASGI application: routes, keys, bodies in, answers out. One coroutine for each request.

After it has submitted the request, the coroutine waits in `receive`, which returns when the client hangs up or the
answer is complete. So a hang-up is noticed at once, at any stage, without another task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import orjson

from api.openai.asgi import (
    ClientGone,
    Receive,
    Scope,
    Send,
    header,
    read_body,
    refuse_body,
    respond,
    respond_error,
)
from api.openai.gateway import Caller, Gateway
from api.openai.in_flight import CHAT, COMPLETIONS, RESPONSES, InFlightRequest
from api.openai.protocol.errors import ApiError, shutting_down
from api.openai.protocol.response_requests import load_response_request, parse_response_request
from api.openai.protocol.schemas import Body, Item, Parsed, parse_request
from api.openai.response_calls import stored_response
from api.openai.status_pages import PATHS, StatusPages
from api.openai.steps import StoredStep
from api.openai.stored_responses import BackgroundAnswer
from api.openai.tenants import Held
from api.openai.workflow_calls import WORKFLOWS, begin, one
from controller.slo.workflow import WorkflowTime
from workers.forks import KvCheckpoint
from workers.http.details import LIVE
from workers.http.limits import LIMITS
from workers.http.protocol import CLOSED

T = TypeVar("T")
log = logging.getLogger(__name__)

HEAVY_BYTES = 64 << 10  # parsing more than this takes a millisecond: done in a thread
HEAVY_COUNTED_BYTES = 4 << 10  # the same where tokens are counted
JUDGED_FOR_S = 0.1  # how long a key counts as judged, unless the configuration changes or the gateway closes
MODELS = "/v1/models"
SERVED = (CHAT, COMPLETIONS, RESPONSES, MODELS, WORKFLOWS)
Handler = Callable[[Gateway, Scope, Receive, Send], Awaitable[None]]


class OpenAIApp:
    """`start` and `stop` are called by the lifespan; they build and close what needs a running loop."""

    def __init__(
        self,
        start: Callable[[], Awaitable[Gateway]],
        stop: Callable[[], Awaitable[None]],
        body_bytes: int = LIMITS["gateway"].body_bytes,
    ) -> None:
        self._start = start
        self._stop = stop
        self._body_bytes = body_bytes
        self._gateway: Gateway | None = None
        self._status = StatusPages()
        self.routes: dict[str, Handler] = {
            **dict.fromkeys((COMPLETIONS, CHAT, RESPONSES), self._generate),
            **dict.fromkeys(PATHS, self._status_page),
            MODELS: self._models,
            WORKFLOWS: begin,
        }
        # Addresses that begin so.
        self.prefixes: dict[str, Handler] = {
            f"{MODELS}/": self._models,
            f"{RESPONSES}/": stored_response,
            f"{WORKFLOWS}/": one,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    self._gateway = await self._start()
                except Exception as error:
                    log.exception("the gateway cannot start")
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    return
                await send({"type": "lifespan.startup.complete"})
            else:
                await self._stop()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == LIVE:  # before the gateway is needed: a probe must not end a process that only starts
            await self._status.live(send)
            return
        gateway = self._gateway
        if gateway is None:
            await respond_error(send, ApiError("no_capacity", "The gateway is starting.", retry_after_s=1))
            return
        try:
            await self._route(gateway, scope, receive, send)
        except ApiError as error:
            if not error.about:  # else it has a record, which was counted
                gateway.instruments.refused(error.code)
            if error.code == "request_too_large":
                await refuse_body(send, receive, error)
            else:
                await respond_error(send, error)
        except ClientGone:  # nobody reads an answer, and nothing was queued yet
            return

    async def _route(self, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        handle = self.routes.get(path)
        if handle is None:
            handle = next((each for start, each in self.prefixes.items() if path.startswith(start)), None)
        if handle is None:
            raise ApiError("not_found", f"There is no {path[:200]!r} here; served: {', '.join(SERVED)}.")
        await handle(gateway, scope, receive, send)

    async def _generate(self, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        _only(scope["method"], "POST")
        await generate(gateway, scope, receive, send, self._body_bytes)

    async def _models(self, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        _only(scope["method"], "GET")
        caller = gateway.caller(header(scope, b"authorization"))
        await respond(send, 200, orjson.dumps(models(gateway, caller, scope["path"][len(MODELS) + 1 :])))

    async def _status_page(self, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        await self._status.answer(gateway, scope, send)


def _only(method: str, wanted: str) -> None:
    if method != wanted:
        raise ApiError("method_not_allowed", f"Use {wanted}.")


@dataclass(slots=True)
class Asked:
    """A request, by its id, and what Redis knew of it before it is let in: what its workflow has left, the kept answer
    of its step, the checkpoint of its branch."""

    name: str
    workflow_id: str
    workflow: WorkflowTime | None = None
    stored: StoredStep | None = None
    origin: KvCheckpoint | None = None


async def generate(gateway: Gateway, scope: Scope, receive: Receive, send: Send, body_bytes: int) -> None:
    """Completions, chat completions and responses, streamed and not. Returns when the request has ended."""
    path = scope["path"]
    key = header(scope, b"authorization")
    keys, asked_at = gateway.keys, gateway.clock()
    caller = gateway.caller(key)
    held = Held(gateway.quotas, caller.tenant, asked_at)
    asked: Asked | None = None  # until it is let in
    try:
        try:
            raw = await read_body(scope, receive, body_bytes, held.add, held.turns)
        except asyncio.CancelledError:  # the server's grace is over; by itself it would answer a bare 500
            if not gateway.closing:
                raise
            raise shutting_down() from None
        arrival = gateway.clock()
        heavy = len(raw) > (HEAVY_COUNTED_BYTES if gateway.tokenizers else HEAVY_BYTES)
        if path == RESPONSES:
            parsed = await _parse_response(raw, gateway, caller, arrival, heavy=heavy)
            whole = len(parsed.head) * (1 if parsed.kept is None else 2)  # the kept input is in memory as well
            held.add(max(0, whole - held.size))
        else:
            parsed = await _run(partial(_parse, path, raw, gateway), heavy=heavy)
        del raw  # a waiting request keeps only the body for its engine
        asked = Asked(gateway.new_id(), parsed.workflow)
        await _ask_first(gateway, parsed, caller, arrival, asked)
        changed = gateway.keys is not keys or gateway.closing or gateway.config_stale
        if changed or gateway.clock() - asked_at > JUDGED_FOR_S:
            caller = gateway.caller(key)  # again: the key may have been revoked while the body came
        chat = path != COMPLETIONS
        let_in = partial(
            gateway.submit,
            parsed,
            caller,
            arrival=arrival,
            chat=chat,
            name=asked.name,
            workflow=asked.workflow,
            stored=asked.stored,
            origin=asked.origin,
        )
        if parsed.kept is not None and parsed.kept.background:
            answer = BackgroundAnswer(gateway.responses, caller.tenant.name, parsed.kept, held)
            in_flight, asked = let_in(answer), None
            begun = await gateway.responses.begin(in_flight, answer)
            held = Held(gateway.quotas, caller.tenant, arrival)  # the answer gives its own back
            await _tell_begun(gateway, caller, begun, receive, send, in_flight)
            return
        in_flight, asked = let_in(send), None
        del parsed, let_in
        while (await receive())["type"] != "http.disconnect":
            continue
        gateway.hang_up(in_flight, scope.get(CLOSED, "client_closed"))
    finally:
        held.give_back()
        if asked is not None and asked.workflow is not None:  # it has asked, and was not let in
            gateway.workflows.refused(caller.tenant.name, asked.workflow_id, asked.workflow.number)


async def _ask_first(gateway: Gateway, parsed: Parsed, caller: Caller, arrival: float, asked: Asked) -> None:
    """Raises ApiError."""
    tenant = caller.tenant
    if parsed.workflow:
        gateway.check_entitled(parsed, tenant)  # or a request that is refused would begin a workflow
        if not gateway.quotas.used_up(tenant, arrival):
            asked.workflow = await gateway.workflows.time_of(parsed, tenant.name, asked.name)
            asked.stored = await gateway.steps.find(parsed, tenant)
            gateway.workflows.check(tenant.name, parsed.workflow)
    if parsed.branch and asked.stored is None:
        asked.origin = await gateway.forks.find(tenant.name, parsed.branch)


async def _tell_begun(
    gateway: Gateway, caller: Caller, begun: Item, receive: Receive, send: Send, in_flight: InFlightRequest
) -> None:
    """A background response has begun: what its client gets, which may go now."""
    headers = in_flight.headers()
    if in_flight.streamed:
        await gateway.readers.tell_begun(caller.tenant.name, begun["id"], caller.key_id, receive, send, headers)
    else:
        await respond(send, 200, orjson.dumps(begun), headers)


async def _parse_response(raw: Body, gateway: Gateway, caller: Caller, arrival: float, *, heavy: bool) -> Parsed:
    """With the conversation that it goes on from. Raises ApiError."""
    tenant, items = caller.tenant, list[Item]()
    asked = await _run(partial(load_response_request, raw), heavy=heavy)
    if asked.previous is not None:
        if gateway.quotas.used_up(tenant, arrival):
            raise ApiError("rate_limit_exceeded", "Over the quota of requests.", retry_after_s=1.0)
        items = await gateway.responses.before(tenant.name, asked.previous)
    retention_s = tenant.retention_s if gateway.steps.board is not None else 0
    parse = partial(parse_response_request, asked, gateway.models, gateway.tokenizers.count)
    return await _run(partial(parse, before=items, retention_s=retention_s), heavy=heavy or bool(items))


async def _run(parse: Callable[[], T], *, heavy: bool) -> T:
    return await asyncio.to_thread(parse) if heavy else parse()


def _parse(path: str, raw: Body, gateway: Gateway) -> Parsed:
    return parse_request(raw, gateway.models, gateway.tokenizers.count, chat=path == CHAT)


def models(gateway: Gateway, caller: Caller, name: str) -> dict[str, object]:
    """All models that the tenant may use, or one by name or alias."""
    allowed = caller.tenant.entitled.allowed_models
    usable = {own: model for own, model in gateway.models.items() if not allowed or model.name in allowed}
    if name:
        model = usable.get(name)
        if model is None:
            raise ApiError("model_not_found", f"The model {name[:100]!r} does not exist.", param="model")
        return _card(name, model.context_tokens)
    cards = [_card(name, model.context_tokens) for name, model in sorted(usable.items())]
    return {"object": "list", "data": cards}


def _card(name: str, context_tokens: int) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "slackline", "max_model_len": context_tokens}
