"""Adapter to the reference engine: vLLM's dialect, with sleep always available and its latency profile told."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from workers.backends.base import BACKENDS, Capabilities, Promise, UpstreamCall
from workers.backends.vllm import VllmBackend

LONGEST_S = 86_400.0  # a day: the engine's bound on any of these


@BACKENDS.register("reference")
class ReferenceBackend(VllmBackend):
    """Same requests, same metric names; only what may be asked of it differs. It is told what was promised, for the
    batching policies that read deadlines: `target_ttft`, `target_tbt`, `waited` (seconds of the TTFT that had passed)
    and `value`. No other engine knows these fields."""

    capabilities = Capabilities(priority=True, sleep=True, profile=True, handover=True)

    def body_of(self, call: UpstreamCall) -> bytes:
        head = call.head
        for name, value in _promised(call.promise):
            head += b'%s"%s":%.6f' % (b"" if head.endswith(b"{") else b",", name, min(value, LONGEST_S))
        return super().body_of(replace(call, head=head))


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
