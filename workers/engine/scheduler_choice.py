"""Chooses the scheduler of an engine: continuous batching, or FlowPrefill's scheduler, which preempts within a step."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from controller.core.errors import ConfigError
from controller.core.steps import BOUNDARIES
from controller.core.types import LatencyCoefficients, Role
from controller.engine import EngineConfig, EngineScheduler, PreemptionConfig, PreemptivePrefill
from controller.policies.batching import Batching
from controller.policies.batching.slo_aware_batching import SloAwareBatching
from controller.policies.by_stage import BY_STAGE, NOTHING, SCHEDULERS, EnginePart, engine_part

BATCHING = SloAwareBatching.name


def add_scheduler_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--scheduler",
        default="continuous",
        choices=list(SCHEDULERS),
        help=f"{BY_STAGE}: the best one for --role (%(default)s)",
    )
    add("--deadlines", action="store_true", help=f"{BY_STAGE}: requests have end-to-end deadlines or workflows")
    add("--boundary", choices=BOUNDARIES, help="preemptive: where a running prefill may be suspended (operator)")
    add("--chunk-tokens", type=int, help="preemptive: most prompt tokens of one step (no limit)")


def preemption_config(args: argparse.Namespace) -> PreemptionConfig | None:
    """The preemption settings; None for the continuous scheduler. `build_scheduler` adds predicted times."""
    if args.scheduler == "continuous":
        for name in ("boundary", "chunk_tokens"):
            if getattr(args, name) is not None:
                raise ConfigError("requires --scheduler preemptive", name)
        return None
    if args.batching not in (None, BATCHING):
        raise ConfigError(f"the preemptive scheduler batches by {BATCHING}, not {args.batching}", "batching")
    return PreemptionConfig(boundary=args.boundary or "operator", chunk_tokens=args.chunk_tokens)


def choose_by_stage(args: argparse.Namespace) -> EnginePart | None:
    """The part of the combined set for this role; `args` then name its scheduler and batching. None: `--scheduler` does
    not name the combined set."""
    if args.scheduler != BY_STAGE:
        if args.deadlines:
            raise ConfigError(f"requires --scheduler {BY_STAGE}", "deadlines")
        return None
    if args.batching is not None:
        raise ConfigError(f"must not be set with --scheduler {BY_STAGE}, which chooses it by --role", "batching")
    part = engine_part(Role(args.role), args.deadlines)
    args.scheduler = next(name for name, kind in SCHEDULERS.items() if kind == part.engine_kind)
    args.batching = part.batching
    return part


def build_scheduler(
    config: EngineConfig,
    batching: Batching,
    preemption: PreemptionConfig | None,
    latency: LatencyCoefficients | None,
    given: Mapping[str, Any] = NOTHING,
) -> EngineScheduler:
    """The scheduler. `latency`: predicts the steps of the preemptive scheduler, except for options in `given`, which
    were set explicitly; the continuous scheduler does not need it."""
    if preemption is None:
        return EngineScheduler(config, batching)
    if latency is None:
        raise ConfigError("the preemptive scheduler requires a latency profile", "profile")
    if not isinstance(batching, SloAwareBatching):
        raise ConfigError(f"the preemptive scheduler batches by {BATCHING}, not {batching.name}", "batching")
    believed: dict[str, Any] = {
        "prefill_a": latency.prefill_a,
        "prefill_b": max(latency.prefill_b, 1e-9),
        "prefill_c": latency.prefill_c,
        "batch_tokens": config.max_num_batched_tokens,
    }
    rules = replace(batching.config, **{name: value for name, value in believed.items() if name not in given})
    margins = PreemptionConfig(
        preemption.boundary,
        preemption.chunk_tokens,
        *(latency.decode_a, latency.decode_b, latency.decode_c, preemption.decode_margin_s),
    )
    return PreemptivePrefill(config, SloAwareBatching(rules), margins)
