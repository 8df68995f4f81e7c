"""The combined set `slackline` inside the engines: what each runs, with which options, by what it is there for.

The dispatcher of that name stands in front. Measured with these options on the home workload of each paper:
docs/reproduction/combined.md. Engine and simulator build what they run from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from controller.core.types import LatencyCoefficients, Role

EngineKind = Literal["continuous", "preemptive_prefill"]
BY_STAGE = "slackline"  # as the name of a scheduler: the one of this file, by role
# What the reference engine's `--scheduler` calls a scheduler, and what the simulator's `engine_kind` calls it.
SCHEDULERS: Mapping[str, str] = MappingProxyType(
    {"continuous": "continuous", "preemptive": "preemptive_prefill", BY_STAGE: BY_STAGE}
)
LEAST_S = 1e-9
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class EnginePart:
    """A scheduler and its batching policy, by their names. `options` are the policy's; `profiled` names those that the
    engine's latency profile gives, by the coefficient they are (controller.core.types.LatencyCoefficients)."""

    engine_kind: EngineKind
    batching: str
    options: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    profiled: Mapping[str, str] = field(default_factory=lambda: NOTHING)

    def options_for(self, latency: LatencyCoefficients | None, batch_tokens: int) -> dict[str, Any]:
        """Of an engine with that profile (None: nobody knows it, and the policy's own defaults stay) whose step takes
        `batch_tokens`."""
        found = dict(self.options)
        if self.engine_kind == "preemptive_prefill":
            found["batch_tokens"] = batch_tokens
        if latency is not None:
            found |= {name: _said(latency, coefficient) for name, coefficient in self.profiled.items()}
        return found


def _said(latency: LatencyCoefficients, coefficient: str) -> float:
    """Policies divide by the seconds of a prompt token, which a constant profile has none of."""
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
_DECODE = EnginePart("continuous", "kairos_decode", profiled=_own("decode_a", "decode_b", "decode_c"))


def engine_part(role: Role, deadlines: bool = False) -> EnginePart:
    """`deadlines`: end-to-end deadlines or workflows are promised there, beside (or instead of) TTFT and TPOT.

    Prefill: slack-aware EDF, left at operators (FlowPrefill). Decode: slack-guided batches (Kairos, Alg. 3).
    Collocated: continuous batching in the gateway's order, or CALM (Concord, eq. 4.1, packed by bandwidth) where whole
    answers count: 96 sequences a step, the best of Concord's sweep, so an engine needs more `max_num_seqs` than that
    for those that wait with their KV.
    """
    if role is Role.PREFILL:
        return _PREFILL
    if role is Role.DECODE:
        return _DECODE
    return _WITH_DEADLINES if deadlines else _COLLOCATED


def told_batching(told: Mapping[str, Any], role: Role) -> str | None:
    """How an engine batches that was started with these options (`scheduler`, `deadlines`, `batching`); None where they
    do not say. A role given later leaves an engine's scheduler as it is: `role` is that of its start."""
    if told.get("scheduler") == BY_STAGE:
        return engine_part(role, told.get("deadlines") is True).batching
    said = told.get("batching")
    name = said if isinstance(said, str) and said else None  # an endpoint of somebody else may say anything
    return _PREFILL.batching if name is None and told.get("scheduler") == "preemptive" else name
