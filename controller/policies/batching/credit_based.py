"""SCORPIO's credit-based batching: how often a sequence decodes depends on its TPOT, relative to the tightest one.

Source as in controller/policies/admission/scorpio_ttft_guard.py. In each step every decoding sequence earns (tightest
TPOT of all that decode) / (its own TPOT) credits. With one whole credit it decodes and pays one. So the tightest
decodes in every step and looser ones in a share of them. This makes steps shorter for those that need it and lets more
requests be admitted.

Deviations: prompts get the rest of the step's budget after the decodes (chunked prefill), whereas SCORPIO runs prompts
in steps of their own and credits are earned only in decode steps. A sequence without a TPOT target counts like the
loosest one that has a target, so it never stops. Not steady, since the decoding sequences change from step to step.
Cost: O(n) in running sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from controller.core.steps import Aborted, EngineEvent, Seq, StepRan
from controller.policies.batching.base import BATCHINGS, EngineView, Grant
from controller.policies.batching.filling import fill, prompts

WHOLE = 1.0 - 1e-9  # rounding: ten credits of a tenth must make one


@dataclass(frozen=True, slots=True)
class CreditBasedConfig:
    """No settings."""


@BATCHINGS.register("credit_based")
class CreditBased:
    name: ClassVar[str] = "credit_based"
    Config = CreditBasedConfig

    def __init__(self, config: CreditBasedConfig | None = None) -> None:
        self.config = config or CreditBasedConfig()
        self._credit: dict[str, float] = {}
        self._known: dict[str, Seq] = {}

    def compose(self, engine: EngineView, now: float) -> list[Grant]:
        decoding = [seq for seq in engine.running if seq.decoding]
        tightest, loosest = _bounds(decoding)
        earned = {seq.id: self._credit.get(seq.id, 0.0) + _share(seq, tightest, loosest) for seq in decoding}
        grants = [Grant(seq, 1) for seq in decoding if earned[seq.id] >= WHOLE][: engine.token_budget]
        grants += fill(engine, prompts(engine), engine.token_budget - len(grants))
        return grants or [Grant(seq, 1) for seq in decoding]

    def observe(self, event: EngineEvent, now: float) -> None:
        if isinstance(event, StepRan):
            self._ran(event)
        elif isinstance(event, Aborted):
            self._forget(event.seq)
        elif isinstance(seq := getattr(event, "seq", None), Seq):
            self._known[seq.id] = seq

    def _ran(self, event: StepRan) -> None:
        """All that could decode earn; those that decoded pay. Whole credits do not accumulate beyond the next step."""
        for seq in [seq for seq in self._known.values() if seq.finish is not None]:
            self._forget(seq)
        new = {chunk.seq.id for chunk in event.step.chunks}
        active = [seq for seq in self._known.values() if seq.decoding and seq.id not in new]
        tightest, loosest = _bounds(active)
        ran = {seq.id for seq in event.step.decodes}
        for seq in active:
            paid = event.repeats if seq.id in ran else 0
            credit = self._credit.get(seq.id, 0.0) + event.repeats * _share(seq, tightest, loosest) - paid
            self._credit[seq.id] = min(1.0, max(0.0, credit))

    def _forget(self, seq: Seq) -> None:
        self._known.pop(seq.id, None)
        self._credit.pop(seq.id, None)


def _bounds(seqs: Iterable[Seq]) -> tuple[float, float]:
    """The tightest and the loosest TPOT target, seconds; infinite if there is none."""
    promised = [seq.tpot_s for seq in seqs if math.isfinite(seq.tpot_s)]
    return (min(promised), max(promised)) if promised else (math.inf, math.inf)


def _share(seq: Seq, tightest: float, loosest: float) -> float:
    """The share of steps in which it decodes."""
    if math.isinf(tightest):
        return 1.0
    return tightest / (seq.tpot_s if math.isfinite(seq.tpot_s) else loosest)
