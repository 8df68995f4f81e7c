"""What SGLang's adapter knows of its server, and its change of role, which wants a server that is fully idle.

Its memory is given back and taken again by orders that are kept (`workers.actions.sglang_sleep`): to release or
resume a second time ends the server, so who does either must know what was done before, also by a process that is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

from controller.core.types import InstanceSpec, Role
from workers.backends.base import EngineError, Limits, RoleRefused, RoleSwitch
from workers.backends.http import HttpBackend
from workers.backends.sglang_state import GRAPHS, ServerInfo, busy_with, parse_info

INFO_S = 5.0  # it asks the scheduler, which may be inside a long step
INFO_KEPT_S = 30.0  # a server started again with other options is known after that, if not by its silence before
SWITCHING_TRANSFERS = ("mooncake", "mori")


class SglangControl(HttpBackend):
    """`known` is the server's description, read at first need and each half minute of telemetry."""

    kind = "SGLang"

    def __init__(self, spec: InstanceSpec, session: aiohttp.ClientSession, limits: Limits) -> None:
        super().__init__(spec, session, limits)
        self._info: ServerInfo | None = None
        self._read_at = 0.0

    async def known(self, now: float | None = None) -> ServerInfo:
        """`now`: the caller's monotonic seconds; with them it is read again when it is old. Slow to answer: the old one
        holds."""
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
        """It went away: what comes back may be another."""
        self._info = None

    async def _busy(self) -> str:
        return busy_with(await self._get("/v1/loads?include=core,disagg"))

    # ---- role ------------------------------------------------------------------------------------------------------

    async def role_settings(self) -> Mapping[str, Any]:
        """The decode graphs it captured: an engine that never decoded must be told of their batch sizes and memory."""
        self.forget()
        return (await self.known()).graphs

    async def role(self) -> Role:
        self.forget()
        return (await self.known()).role

    async def set_role(self, role: Role, settings: Mapping[str, Any] | None = None) -> RoleSwitch:
        """One try, with a dry run before it; the caller has seen to it that nothing is sent there. Raises RoleRefused.

        A call that is answered too late may still have switched: asked again, the server says so.
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


def _check_switchable(info: ServerInfo, role: Role) -> None:
    """What can be known before the server is asked."""
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
    if error.status or error.unreachable:  # of a dry run too: what became of the server nobody knows
        return RoleRefused("connection_lost", f"SGLang was lost while it switched: {error}", restorable=False)
    return RoleRefused("no_answer", f"{error}; whether it switched is not known yet", again=True)


def _said_no(said: Mapping[str, Any], dry: bool) -> RoleRefused:
    """`safe_to_restore` goes before the words. An answer without it: a dry run changed nothing, a real one may have."""
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
