"""Adapter to the reference engine: vLLM's dialect, with sleep always available and its latency profile told."""

from __future__ import annotations

from workers.backends.base import BACKENDS, Capabilities
from workers.backends.vllm import VllmBackend


@BACKENDS.register("reference")
class ReferenceBackend(VllmBackend):
    """Same requests, same metric names; only what may be asked of it differs."""

    capabilities = Capabilities(priority=True, sleep=True, profile=True, handover=True)
