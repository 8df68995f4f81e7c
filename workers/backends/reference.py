"""Adapter to the reference engine: vLLM's dialect, with the targets of each request added."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import orjson

from controller.core.kv_links import LinkReport, report_from_json
from controller.core.types import Role
from workers.backends.base import (
    BACKENDS,
    CallTargets,
    Capabilities,
    EngineError,
    RoleRefused,
    RoleSwitch,
    UpstreamCall,
)
from workers.backends.vllm import VllmBackend
from workers.http.fleet_proof import CHALLENGE_PATH, call_headers, fleet_token

LONGEST_S = 86_400.0  # a day: the engine's bound on each of these


@BACKENDS.register("reference")
class ReferenceBackend(VllmBackend):
    """The same requests and metric names as vLLM, and more capabilities. Requests carry their targets for the batching
    policies that read deadlines: `target_ttft`, `target_tbt`, `waited` (seconds of the TTFT that had passed) and
    `value`; and its hints (`Hints.fields`). No other engine knows these fields."""

    kind = "The reference engine"
    capabilities = Capabilities(
        disaggregates=True,
        frees_kv=True,
        links=True,
        offers_early=True,
        tells_pulling=True,
        checkpoints=True,
        tells_landing=True,
        takes_bounds=True,
    )

    async def free_kv(self, request_ids: Sequence[str]) -> None:
        await self._as_fleet("/kv/release", {"request_ids": list(request_ids)}, self._limits.telemetry_s)

    async def renew_kv(self, request_id: str, lease_s: float) -> bool:
        try:
            await self._as_fleet("/kv/renew", {"request_id": request_id, "lease_s": lease_s}, self._limits.telemetry_s)
        except EngineError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return False
            raise
        return True

    async def tell_bounds(self, bounds: Mapping[str, tuple[int, int]]) -> None:
        await self._as_fleet("/bounds", {"bounds": bounds}, self._limits.telemetry_s)

    async def links(self) -> Sequence[LinkReport]:
        try:
            return [report_from_json(each) for each in orjson.loads(await self._get("/links"))["peers"]]
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise EngineError(f"instance {self.spec.id} sent unreadable links: {error!r}") from error

    async def role(self) -> Role:
        try:
            return Role(orjson.loads(await self._get("/server_info"))["role"])
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise EngineError(f"instance {self.spec.id} did not say its role: {error!r}") from error

    async def set_role(self, role: Role, settings: Mapping[str, Any] | None = None) -> RoleSwitch:
        """The engine exchanges its scheduler, if its role chose it. At an engine of an older release, which has no such
        call, a role is routing alone."""
        try:
            await self._as_fleet("/role", {"role": role.value})
        except EngineError as error:
            if error.status == HTTPStatus.CONFLICT:
                raise RoleRefused("not_idle", str(error), again=True) from error
            if error.status == HTTPStatus.BAD_REQUEST:
                raise RoleRefused("engine_refused", str(error)) from error
            if error.status != HTTPStatus.NOT_FOUND:
                raise
        return RoleSwitch(self.spec.role, role, "")

    async def _as_fleet(self, path: str, body: Mapping[str, Any], limit_s: float | None = None) -> None:
        """POST with a proof that we know the fleet's token. Raises EngineError; of an engine that asks for no proof
        (an older version, or another program), with the status of the challenge, and nothing else was sent."""
        try:
            challenge = str(orjson.loads(await self._get(CHALLENGE_PATH))["challenge"])
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise EngineError(f"instance {self.spec.id} gave no challenge: {error!r}") from error
        raw = orjson.dumps(body)
        await self._control(path, raw, limit_s, call_headers(fleet_token(), challenge, self._base, "POST", path, raw))

    def body_of(self, call: UpstreamCall) -> bytes:
        head = call.head
        for name, value in _target_fields(call.targets):
            head += b'%s"%s":%.6f' % (b"" if head.endswith(b"{") else b",", name, min(value, LONGEST_S))
        if call.hints is not None and (told := call.hints.fields(queued=self.spec.selects)):
            head += (b"" if head.endswith(b"{") else b",") + orjson.dumps(told)[1:-1]
        if call.checkpoint_s:
            head += b',"kv_checkpoint":%.3f' % call.checkpoint_s
        if call.branch_of:
            head += b',"kv_branch_of":"%s"' % call.branch_of.encode()
        return self._with_ours(head, call)


def _target_fields(targets: CallTargets | None) -> Iterator[tuple[bytes, float]]:
    if targets is None:
        return
    if math.isfinite(targets.ttft_s):
        yield b"target_ttft", targets.ttft_s
        yield b"waited", max(0.0, targets.waited_s)
    if math.isfinite(targets.tpot_s):
        yield b"target_tbt", targets.tpot_s
    if targets.value != 1.0:
        yield b"value", targets.value
