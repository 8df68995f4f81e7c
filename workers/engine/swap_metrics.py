"""Metrics of KV in host memory under Slackline's names, since vLLM's v1 has none."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge

from controller.engine.swapping import REASONS, SwapCounts
from workers.engine.engine import Engine


def expose(engine: Engine, registry: CollectorRegistry) -> None:
    """Figures of the engine's present scheduler; counts go on when it is exchanged."""

    def used() -> int:
        return 0 if engine.scheduler.swaps is None else engine.scheduler.swaps.used

    for name, text, read in (
        ("kv_host_blocks", "KV blocks of host memory for evicted sequences.", lambda: engine.config.swap_blocks),
        ("kv_host_blocks_used", "Blocks of host memory that hold KV.", used),
        ("kv_swapped_out_blocks", "KV blocks copied to host memory, since the start.", lambda: _counts(engine).out),
        ("kv_swapped_back_blocks", "KV blocks copied back, since the start.", lambda: _counts(engine).back),
    ):
        Gauge(f"slackline_{name}", text, registry=registry).set_function(read)
    text = "Evicted sequences by whether their KV was swapped and why, since the start."
    choices = Gauge("slackline_kv_evictions", text, ("choice",), registry=registry)
    for reason in REASONS:
        choices.labels(reason).set_function(_reader(engine, reason))


def _reader(engine: Engine, reason: str) -> Callable[[], float]:
    return lambda: _counts(engine).choices[reason]


def _counts(engine: Engine) -> SwapCounts:
    return engine.scheduler.totals.swaps
