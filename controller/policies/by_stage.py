"""The engines' part of the combined policy set `slackline`: scheduler, batching and options by role.

It is the default of reference engines that are started to prefill or to decode, and an engine whose role changes
exchanges one part for the other. The gateway runs the dispatcher and migrator of that name. Results with these options
on each paper's workload are in docs/reproduction/combined.md. Both the reference engine and the simulator build their
scheduler from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from controller.core.types import LatencyCoefficients, Role

EngineKind = Literal["continuous", "preemptive_prefill"]
BY_STAGE = "slackline"  # scheduler name that means: as this module says, by role
# Names of schedulers: `--scheduler` of the reference engine to `engine_kind` of the simulator.
SCHEDULERS: Mapping[str, str] = MappingProxyType(
    {"continuous": "continuous", "preemptive": "preemptive_prefill", BY_STAGE: BY_STAGE}
)
LEAST_S = 1e-9
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class EnginePart:
    """Names of a scheduler and its batching policy.

    `options`: of the policy. `profiled`: options that come from the engine's latency profile, with the name of the
    coefficient (controller.core.types.LatencyCoefficients).
    """

    engine_kind: EngineKind
    batching: str
    options: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    profiled: Mapping[str, str] = field(default_factory=lambda: NOTHING)

    def options_for(self, latency: LatencyCoefficients | None, batch_tokens: int) -> dict[str, Any]:
        """Options for an engine with that profile and `batch_tokens` per step.

        Without a profile (None) the policy's defaults stay.
        """
        found = dict(self.options)
        if self.engine_kind == "preemptive_prefill":
            found["batch_tokens"] = batch_tokens
        if latency is not None:
            found |= {name: _positive(latency, coefficient) for name, coefficient in self.profiled.items()}
        return found


def _positive(latency: LatencyCoefficients, coefficient: str) -> float:
    """The coefficient; seconds per prompt token are at least LEAST_S, because policies divide by them."""
    value: float = getattr(latency, coefficient)
    return max(value, LEAST_S) if coefficient == "prefill_b" else value


def _own(*names: str) -> Mapping[str, str]:
    return MappingProxyType({name: name for name in names})


_COLLOCATED = EnginePart("continuous", "chunked_prefill")
_WITH_DEADLINES = EnginePart(
    "continuous",
    "calm",
    MappingProxyType({"rectangles": True, "slots": 96}),
    MappingProxyType({"prefill_s": "prefill_b"}),
)
_PREFILL = EnginePart("preemptive_prefill", "slo_aware_batching", profiled=_own("prefill_a", "prefill_b", "prefill_c"))
_DECODE = EnginePart(
    "continuous",
    "kairos_decode",
    MappingProxyType({"if_needed": True}),
    _own("decode_a", "decode_b", "decode_c"),
)


def engine_part(role: Role, deadlines: bool = False) -> EnginePart:
    """The scheduler and batching of one role.

    `deadlines`: requests have end-to-end deadlines or belong to workflows, beside (or instead of) TTFT and TPOT.
    Prefill: slack-aware EDF with preemption at operators (FlowPrefill). Decode: slack-guided batches (Kairos, Alg. 3)
    where a step of all would be too slow for the tightest TPOT.
    Collocated: continuous batching in the gateway's order; with `deadlines` CALM (Concord, eq. 4.1, packed by
    bandwidth) of 96 sequences per step, the best of Concord's sweep. Such an engine needs a larger `max_num_seqs` for
    sequences that wait with their KV.
    """
    if role is Role.PREFILL:
        return _PREFILL
    if role is Role.DECODE:
        return _DECODE
    return _WITH_DEADLINES if deadlines else _COLLOCATED


# Start options that say how an engine batches: with any of them an engine that is started in a role keeps to it.
SAYING = ("batching", "batching_options", "long_prefill_token_threshold", "boundary", "chunk_tokens")


def scheduler_of(options: Mapping[str, Any], role: Role) -> str:
    """The scheduler's name (SCHEDULERS) of a reference engine with these start options.

    It is the one that they name, else the combined set's if the engine is started to prefill or to decode and no option
    says how it batches."""
    named = options.get("scheduler")
    if isinstance(named, str) and named:
        return named
    said = any(options.get(name) not in (None, "", {}) for name in SAYING)
    return "continuous" if said or role is Role.COLLOCATED else BY_STAGE


def batching_of(options: Mapping[str, Any], role: Role) -> str | None:
    """How a reference engine with these start options batches; None if they do not tell.

    `role`: the one that its scheduler is of, at its start or after an exchange.
    """
    if scheduler_of(options, role) == BY_STAGE:
        return engine_part(role, options.get("deadlines") is True).batching
    named = options.get("batching")
    name = named if isinstance(named, str) and named else None  # the `spec` of a static instance may hold any value
    return _PREFILL.batching if name is None and options.get("scheduler") == "preemptive" else name
