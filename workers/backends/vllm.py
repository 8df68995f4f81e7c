"""Adapter to vLLM's OpenAI server (V1 engine, 0.32 and newer), and to whatever speaks its HTTP dialect.

Rank goes into `priority` (low first, with `--scheduling-policy priority`), our id into `request_id`. The usage event
that every streamed body asks for is dropped unless the client asked too. Closing the connection aborts in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from controller.core.types import Load
from workers.backends.base import BACKENDS, Capabilities, EngineError, PrefillAnswer, UpstreamCall
from workers.backends.disaggregation import parse_prefilled, prefill_head
from workers.backends.exposition import parse_load
from workers.backends.http import HttpBackend


@BACKENDS.register("vllm")
class VllmBackend(HttpBackend):
    """One vLLM server."""

    kind = "vLLM"
    capabilities = Capabilities(handover=True)

    async def prefill(self, call: UpstreamCall, ending: Callable[[bytes], None] | None = None) -> PrefillAnswer:
        """The pull connectors' first leg: one token, no stream; the answer says where the KV waits."""
        early = self.capabilities.offers_early and ending is not None
        unary = replace(call, head=prefill_head(call.head, early), streamed=False, keep_usage=False)
        async for chunk in self.generate(unary):
            if chunk.offer and ending is not None:
                ending(chunk.offer)
            if chunk.kind == "body":
                return parse_prefilled(chunk.raw)
        raise EngineError("the engine ended the prefill without an answer")

    async def telemetry(self, now: float) -> Load:
        return parse_load((await self._get("/metrics")).decode(), now)

    def body_of(self, call: UpstreamCall) -> bytes:
        return self._with_ours(call.head, call)

    def _with_ours(self, head: bytes, call: UpstreamCall) -> bytes:
        """Our fields go last: the client's own `request_id` or `priority` were stripped before."""
        tail = b'"priority":%d,"request_id":"%s"}' % (call.rank, call.request_id.encode())
        if call.offer:
            tail = b'"kv_transfer_params":%s,' % call.offer + tail
        return head + (b"" if head.endswith(b"{") else b",") + tail
