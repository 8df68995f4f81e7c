"""Adapter to the reference engine: vLLM's dialect, and what was promised goes with each request."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache

import orjson

from controller.core.kv_links import LinkReport, report_from_json
from workers.backends.base import BACKENDS, Capabilities, EngineError, Promise, UpstreamCall
from workers.backends.vllm import VllmBackend
from workers.environment import given

LONGEST_S = 86_400.0  # a day: the engine's bound on any of these


@BACKENDS.register("reference")
class ReferenceBackend(VllmBackend):
    """Same requests, same metric names; only what may be asked of it differs. It is told what was promised, for the
    batching policies that read deadlines: `target_ttft`, `target_tbt`, `waited` (seconds of the TTFT that had passed)
    and `value`. No other engine knows these fields."""

    kind = "The reference engine"
    capabilities = Capabilities(
        handover=True,
        frees_kv=True,
        links=True,
        offers_early=True,
        tells_pulling=True,
        tells_landing=True,
    )

    async def free_kv(self, request_ids: Sequence[str]) -> None:
        await self._control("/kv/release", {"request_ids": list(request_ids), **_fleet()}, self._limits.telemetry_s)

    async def links(self) -> Sequence[LinkReport]:
        try:
            return [report_from_json(each) for each in orjson.loads(await self._get("/links"))["peers"]]
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise EngineError(f"instance {self.spec.id} sent unreadable links: {error!r}") from error

    def body_of(self, call: UpstreamCall) -> bytes:
        head = call.head
        for name, value in _promised(call.promise):
            head += b'%s"%s":%.6f' % (b"" if head.endswith(b"{") else b",", name, min(value, LONGEST_S))
        return self._with_ours(head, call)


def _fleet() -> dict[str, str]:
    """What the engine wants to hear before it stops or gives up KV, from where it has it itself."""
    return {"token": _token(os.environ.get("FLEET_TOKEN_FILE", ""), os.environ.get("FLEET_TOKEN", ""))}


@lru_cache(maxsize=8)
def _token(path: str, value: str) -> str:
    """Read once, for it is told with every batch of KV to free, from the gateway's event loop."""
    return given({"FLEET_TOKEN_FILE": path, "FLEET_TOKEN": value}, "FLEET_TOKEN")


def _promised(promise: Promise | None) -> Iterator[tuple[bytes, float]]:
    if promise is None:
        return
    if math.isfinite(promise.ttft_s):
        yield b"target_ttft", promise.ttft_s
        yield b"waited", max(0.0, promise.waited_s)
    if math.isfinite(promise.tpot_s):
        yield b"target_tbt", promise.tpot_s
    if promise.value != 1.0:
        yield b"value", promise.value
