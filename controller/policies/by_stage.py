"""The combined set `slackline` inside the engines: what each runs, by what it is there for.

The dispatcher of that name stands in front. Measured on the home workload of each paper: docs/reproduction.md, section
Combined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from controller.core.types import Role

EngineKind = Literal["continuous", "preemptive_prefill"]
BY_STAGE = "slackline"  # as the name of a scheduler: the one of this file, by role
# What the reference engine's `--scheduler` calls a scheduler, and what the simulator's `engine_kind` calls it.
SCHEDULERS: Mapping[str, str] = MappingProxyType(
    {"continuous": "continuous", "preemptive": "preemptive_prefill", BY_STAGE: BY_STAGE}
)


@dataclass(frozen=True, slots=True)
class EnginePart:
    """A scheduler and its batching policy, by their names."""

    engine_kind: EngineKind
    batching: str


_COLLOCATED = EnginePart("continuous", "chunked_prefill")
_WITH_DEADLINES = EnginePart("continuous", "calm")
_PREFILL = EnginePart("preemptive_prefill", "slo_aware_batching")
_DECODE = EnginePart("continuous", "kairos_decode")


def engine_part(role: Role, deadlines: bool = False) -> EnginePart:
    """`deadlines`: end-to-end deadlines or workflows are promised there, beside (or instead of) TTFT and TPOT.

    Prefill: slack-aware EDF, left at operators (FlowPrefill). Decode: slack-guided batches (Kairos, Alg. 3).
    Collocated: continuous batching in the gateway's order, or CALM (Concord, eq. 4.1) where whole answers count.
    """
    if role is Role.PREFILL:
        return _PREFILL
    if role is Role.DECODE:
        return _DECODE
    return _WITH_DEADLINES if deadlines else _COLLOCATED
