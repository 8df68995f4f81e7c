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
from controller.policies.batching.options import build
from controller.policies.batching.slo_aware_batching import SloAwareBatching
from controller.policies.by_stage import BY_STAGE, NOTHING, SCHEDULERS, EnginePart, engine_part, scheduler_of

CALM = "calm"  # batching by end-to-end deadlines
BATCHING = SloAwareBatching.name
NO_OPTIONS = "{}"  # of `--batching-options`


def add_scheduler_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--scheduler",
        choices=list(SCHEDULERS),
        help=f"{BY_STAGE}: the best one for --role (its default, unless another option says how to batch; "
        "collocated: continuous)",
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
    """The part of the combined set for this role; `args` then name its scheduler and batching. None: another scheduler
    runs."""
    given = {**vars(args), "batching_options": None if args.batching_options == NO_OPTIONS else args.batching_options}
    args.scheduler = scheduler_of(given, Role(args.role))
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


def deadlines_unused(batching: str, deadlines: bool) -> str:
    """What to warn of if deadlines should order requests here and the batching of the role reads none; "" otherwise."""
    if batching == CALM or not deadlines:
        return ""
    return f"--deadlines has no effect in this role: {batching} batching reads the targets of tokens alone"


def build_scheduler(
    config: EngineConfig,
    batching: Batching,
    preemption: PreemptionConfig | None,
    latency: LatencyCoefficients | None,
    given: Mapping[str, Any] = NOTHING,
    former: EngineScheduler | None = None,
) -> EngineScheduler:
    """The scheduler. `latency`: predicts the steps of the preemptive scheduler, except for options in `given`, which
    were set explicitly; the continuous scheduler does not need it."""
    if preemption is None:
        return EngineScheduler(config, batching, former)
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
    return PreemptivePrefill(config, SloAwareBatching(rules), margins, former)


def scheduler_for(
    role: Role, former: EngineScheduler, latency: LatencyCoefficients | None, deadlines: bool
) -> EngineScheduler:
    """What the combined set runs in this role, in the place of `former`, which is idle.

    Raises ConfigError if it needs a latency profile and there is none.
    """
    part, config = engine_part(role, deadlines), former.config
    batching = build(part.batching, part.options_for(latency, config.max_num_batched_tokens), "batching_options")
    preemption = PreemptionConfig(boundary="operator") if part.engine_kind == "preemptive_prefill" else None
    return build_scheduler(config, batching, preemption, latency, former=former)
