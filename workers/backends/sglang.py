"""Adapter to SGLang's OpenAI server (checked against the source of 0.5.23).

Rank goes into `priority`, negated unless the server puts low values first, and is left out where the server does not
schedule by it (some are started to refuse it then). Our id goes into `rid`, new for each call: an abort by id of an
earlier call cannot hit the next. Prefill and decode are sent together and meet at the prefill engine's bootstrap
server.

A server changes its role only while it is fully idle. Its memory is released and resumed by actions that are stored
(`workers.actions.sglang_sleep`): a second release or resume ends the server, so the caller must know what was done
before, also by a process that is gone.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from typing import Any

import aiohttp
import orjson

from controller.core.types import InstanceSpec, Load, Role
from workers.backends.base import (
    BACKENDS,
    AnswerChunk,
    Capabilities,
    EngineError,
    Limits,
    PrefillAnswer,
    RoleRefused,
    RoleSwitch,
    UpstreamCall,
)
from workers.backends.http import HttpBackend
from workers.backends.sglang_state import (
    GRAPHS,
    ServerInfo,
    busy_with,
    load_of,
    parse_info,
    parse_loads,
    parse_metrics,
)
from workers.http.wire import Connection

ROOM_BITS = 63
NOT_THERE = 404
INFO_S = 5.0  # time limit of /server_info: it asks the scheduler, which may be inside a long step
INFO_KEPT_S = 30.0  # a server that was started again with other options is noticed by then at the latest
SWITCHING_TRANSFERS = ("mooncake", "mori")  # KV transfer backends with which a role can be switched


@BACKENDS.register("sglang")
class SglangBackend(HttpBackend):
    """One SGLang server. `/health` is never read except to wake it: it generates a token, and a failure of it sticks.

    `known` is the server's description, read at first need and again with telemetry every half minute.
    """

    kind = "SGLang"
    capabilities = Capabilities(disaggregates=True, paired=True)

    def __init__(self, spec: InstanceSpec, session: aiohttp.ClientSession, limits: Limits) -> None:
        super().__init__(spec, session, limits)
        # Its headers may come with its first token only.
        headers_s = max(limits.headers_s, limits.between_chunks_s)
        self._patience = self._patience._replace(headers_s=headers_s)
        self._info: ServerInfo | None = None
        self._read_at = 0.0
        self._serial = count()
        self._aborts: set[asyncio.Task[None]] = set()

    # ---- requests --------------------------------------------------------------------------------------------------

    async def generate(self, call: UpstreamCall) -> AsyncIterator[AnswerChunk]:
        """A call that is cut short is aborted by id too: a request that waits for its peer holds blocks."""
        await self._introduced()
        rid = f"{next(self._serial):x}.{call.request_id}"
        ended = False
        try:
            async with aclosing(super().generate(replace(call, request_id=rid))) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield chunk
            ended = True
        except EngineError as error:
            ended = ended or bool(error.status)
            if error.unreachable:
                self.forget()
            raise _coded(error) from error
        finally:
            if not ended:
                self._abort_soon(rid)

    async def _introduced(self) -> None:
        """Read whether it schedules by priority; a server too slow to say gets the request without one."""
        try:
            await self.known()
        except EngineError as error:
            if error.unreachable:
                raise

    def body_of(self, call: UpstreamCall) -> bytes:
        tail = b'"rid":"%s"}' % call.request_id.encode()
        info = self._info
        if info is not None and info.on("enable_priority_scheduling"):
            tail = b'"priority":%d,' % (call.rank if info.low_first else -call.rank) + tail
        if call.salt:
            tail = b'"extra_key":"%s",' % call.salt + tail
        if call.offer:
            tail = call.offer[1:-1] + b"," + tail
        return call.head + (b"" if call.head.endswith(b"{") else b",") + tail

    async def meeting(self) -> bytes:
        """A room at this engine's bootstrap server, under the host by which it is reached here."""
        info = await self.known()
        if info.role is not Role.PREFILL:
            raise EngineError(f"instance {self.spec.id} runs as {info.role}: only a prefill engine has rooms")
        host = self._url("/").host or ""
        room = secrets.randbits(ROOM_BITS)
        return orjson.dumps({"bootstrap_host": host, "bootstrap_port": info.bootstrap_port, "bootstrap_room": room})

    async def prefill(self, call: UpstreamCall, ending: Callable[[bytes], None] | None = None) -> PrefillAnswer:
        """The same body as its decode stage gets. The answer ends when the KV was taken, and holds nothing else."""
        async with aclosing(self.generate(call)) as chunks:  # type: ignore[type-var]
            async for _ in chunks:
                pass
        return PrefillAnswer(b"", False)

    def _abort_soon(self, rid: str) -> None:
        task = asyncio.get_running_loop().create_task(self._abort_rid(rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort_rid(self, rid: str) -> None:
        try:
            await self._control("/abort_request", {"rid": rid, "abort_all": False}, self._limits.telemetry_s)
        except (EngineError, RuntimeError):  # it is gone, or our session is closed: nothing is left to abort
            return

    async def _refused(self, response: aiohttp.ClientResponse | Connection) -> EngineError:
        """SGLang's errors lack OpenAI's outer object."""
        error = await super()._refused(response)
        error.body = _openai_shape(error.body)
        return error

    # ---- telemetry -------------------------------------------------------------------------------------------------

    async def telemetry(self, now: float) -> Load:
        """`/ready`: does it take requests (not while it sleeps)? `/v1/loads`: the counts. The metrics page, where it is
        enabled: token totals, and without `/v1/loads` the counts too, some decode steps old."""
        info = await self.known(now)
        awake, loads, page = await asyncio.gather(self.ready(), self._loads(), self._metrics(info.on("enable_metrics")))
        seen = parse_metrics(page)
        if loads is None and not page:
            raise EngineError("SGLang reports no load: it has no /v1/loads and was started without --enable-metrics")
        load = load_of(seen, now) if loads is None else parse_loads(loads, now, info.role)
        return load._replace(
            prompt_tokens_total=int(seen.get("prompt_tokens_total", 0)),
            generation_tokens_total=int(seen.get("generation_tokens_total", 0)),
            cached_tokens_total=int(seen.get("cached_tokens_total", 0)),
            awake=awake,
        )

    async def _loads(self) -> bytes | None:
        try:
            return await self._get("/v1/loads?include=core,disagg")
        except EngineError as error:
            if error.status == NOT_THERE:
                return None
            raise

    async def _metrics(self, enabled: bool) -> str:
        return (await self._get("/metrics")).decode() if enabled else ""

    async def ready(self) -> bool:
        try:
            await self._get("/ready")
        except EngineError as error:
            if error.unreachable:
                self.forget()
            return False
        return True

    # ---- what is known of the server ---------------------------------------------------------------------------------

    async def known(self, now: float | None = None) -> ServerInfo:
        """The server's description. With `now` (the caller's monotonic seconds) an old one is read again; if the server
        is slow to answer, the old one is used."""
        old = now is not None and now - self._read_at > INFO_KEPT_S
        if self._info is not None and not old:
            return self._info
        try:
            self._info = parse_info(await self._get("/server_info", INFO_S))
        except EngineError as error:
            if self._info is None or error.unreachable:
                raise
        self._read_at = self._read_at if now is None else now
        return self._info

    def forget(self) -> None:
        """The server is gone: the one that comes back may be another."""
        self._info = None

    async def _busy(self) -> str:
        return busy_with(await self._get("/v1/loads?include=core,disagg"))

    # ---- role ------------------------------------------------------------------------------------------------------

    async def role_settings(self) -> Mapping[str, Any]:
        """The decode graphs it captured: an engine that never decoded needs their batch sizes and memory."""
        self.forget()
        return (await self.known()).graphs

    async def role(self) -> Role:
        self.forget()
        return (await self.known()).role

    async def set_role(self, role: Role, settings: Mapping[str, Any] | None = None) -> RoleSwitch:
        """One try, after a dry run; the caller makes sure that nothing is sent there. Raises RoleRefused.

        A call that is answered too late may still have switched: the next try then finds the new role.
        """
        self.forget()
        info = await self.known()
        if info.role is role:
            return RoleSwitch(role, role, "already in target role", already=True)
        _check_switchable(info, role)
        busy = await self._busy()
        if busy:
            raise RoleRefused("not_idle", f"SGLang switches only when idle: {busy}", field=busy.split()[0], again=True)
        body: dict[str, Any] = {"new_role": role.value}
        if role is Role.DECODE:
            graphs = info.graphs if len(info.graphs) == len(GRAPHS) else {**(settings or {}), **info.graphs}
            body |= {name: graphs[name] for name in GRAPHS if name in graphs}
        await self._switch({**body, "prepare_only": True}, dry=True)
        said = await self._switch({**body, "prepare_only": False}, dry=False)
        self.forget()
        return RoleSwitch(info.role, role, str(said.get("message", "")))

    async def _switch(self, body: Mapping[str, Any], *, dry: bool) -> dict[str, Any]:
        try:
            raw = await self._control("/pd_role_switch", body)
        except EngineError as error:
            raise _role_refused(error, dry) from error
        said = _object(raw)
        if not said.get("success"):
            raise _said_no(said, dry)
        return said


def _openai_shape(body: bytes) -> bytes:
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    if not isinstance(said, dict) or said.get("object") != "error":
        return body
    return orjson.dumps({"error": {name: said.get(name) for name in ("message", "type", "param", "code")}})


def _coded(error: EngineError) -> EngineError:
    """An error inside a stream comes with status 200; its real status is in its body."""
    if error.status != 500 or not error.body:
        return error
    try:
        said = orjson.loads(error.body)
        code = int((said.get("error") or said).get("code"))
    except (orjson.JSONDecodeError, AttributeError, TypeError, ValueError):
        return error
    if 400 <= code < 600:
        error.status = code
    return error


def _check_switchable(info: ServerInfo, role: Role) -> None:
    """What can be checked before the server is called. Raises RoleRefused."""
    if Role.COLLOCATED in (info.role, role):
        message = (
            f"SGLang cannot switch from {info.role} to {role} while it runs, because its switch knows prefill and "
            "decode only."
        )
        raise RoleRefused("no_such_switch", message, field="role")
    if not info.on("enable_pd_role_switch"):
        raise RoleRefused(
            "not_enabled", _not_started("switch its role", "--enable-pd-role-switch"), field="enable_pd_role_switch"
        )
    if info.transfer_backend not in SWITCHING_TRANSFERS:
        able = " and ".join(SWITCHING_TRANSFERS)
        message = f"SGLang cannot switch its role because {info.transfer_backend} moves its KV; {able} can."
        raise RoleRefused("transfer_backend", message, field="disaggregation_transfer_backend")


def _role_refused(error: EngineError, dry: bool) -> RoleRefused:
    if error.status in (400, 409, 422):
        return _said_no(_object(error.body), dry)
    if 400 <= error.status < 500:
        return RoleRefused("engine_refused", f"SGLang answered /pd_role_switch with {error.status}")
    if error.status or error.unreachable:  # also in a dry run: the server's state is not known then
        return RoleRefused("connection_lost", f"SGLang was lost while it switched: {error}", restorable=False)
    return RoleRefused("no_answer", f"{error}; whether it switched is not known yet", again=True)


def _said_no(said: Mapping[str, Any], dry: bool) -> RoleRefused:
    """`safe_to_restore` counts, not the message. Without it: a dry run changed nothing, a real one may have."""
    message = str(said.get("message") or "no reason given")
    restorable = said.get("safe_to_restore", dry) is True
    field = next((name for name in GRAPHS if name in message), "")
    reason = "unsafe_to_restore" if not restorable else "not_prepared" if dry else "engine_refused"
    again = restorable and "idle" in message
    return RoleRefused(reason, f"SGLang: {message}", field=field, restorable=restorable, again=again)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        said = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    return said if isinstance(said, dict) else {}


def _not_started(what: str, option: str) -> str:
    return f"SGLang cannot {what} because it was started without {option}."
