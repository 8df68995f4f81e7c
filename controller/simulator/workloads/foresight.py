"""What is known in advance of programs: everything, only a mean, or the truth with a stated error."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from controller.core.estimates import LengthBound
from controller.core.noise import standard_normal
from controller.predict.foresight import KnownLength, MeanLength, NoisyBounds, checked_error
from controller.simulator.workloads.programs import Program, ProgramCall, Speeds, calls_after, stage_seconds


class Fixed:
    """What says the same whatever was observed."""

    __slots__ = ()

    @property
    def learns(self) -> bool:
        return False

    def begins(self, program: Program, stage: int, at: float) -> None:
        return None

    def ended(self, program: Program, call_id: str, began: float, now: float, whole: bool) -> None:
        return None

    def closed(self, program: Program) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Oracle(Fixed):
    """True lengths and graphs (Concord's starred variant)."""

    def length(self, call_id: str, output_tokens: int, program: Program) -> LengthBound:
        return KnownLength(output_tokens)

    def seconds(self, program: Program, speeds: Speeds) -> list[float]:
        return [stage_seconds(stage, speeds) for stage in program.stages]

    def least(self, program: Program, speeds: Speeds) -> list[float]:
        return self.seconds(program, speeds)

    def tokens(self, program: Program) -> float:
        return float(program.tokens)

    def later(self, program: Program, stage: int) -> ProgramCall:
        return calls_after(program, stage)

    @property
    def optimism(self) -> float:
        return 1.0


@dataclass(frozen=True, slots=True)
class Noisy(Fixed):
    """The truth with lognormal errors.

    `length_error`: of an answer's remaining tokens (bound at `quantile` standard deviations). `graph_error`: of each
    stage's time and of the program's tokens, including later ones. The values are ours; the paper shows the errors of
    its predictors only as curves.
    """

    length_error: float = 0.5
    quantile: float = 1.28
    graph_error: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        checked_error(self.length_error, "length_error")
        checked_error(self.graph_error, "graph_error")

    def length(self, call_id: str, output_tokens: int, program: Program) -> LengthBound:
        return NoisyBounds(call_id, output_tokens, self.length_error, self.quantile, self.seed)

    def seconds(self, program: Program, speeds: Speeds) -> list[float]:
        return [
            stage_seconds(stage, speeds) * math.exp(self._z(f"{program.id}/{number}"))
            for number, stage in enumerate(program.stages)
        ]

    def least(self, program: Program, speeds: Speeds) -> list[float]:
        return self.seconds(program, speeds)

    def tokens(self, program: Program) -> float:
        return program.tokens * self._factor(program)

    def later(self, program: Program, stage: int) -> ProgramCall:
        return calls_after(program, stage, self._factor(program))

    def _factor(self, program: Program) -> float:
        return math.exp(self._z(f"{program.id}/tokens"))

    @property
    def optimism(self) -> float:
        return math.exp(-self.quantile * self.graph_error)

    def _z(self, name: str) -> float:
        return self.graph_error * standard_normal(name, self.seed)


@dataclass(frozen=True, slots=True)
class Blind(Fixed):
    """No predictor: every call has the mean answer length, all stages take equally long, and all programs are worth the
    same. It knows how many stages a program has, which no gateway is told: see `BlindToStages`.
    """

    mean_output: int
    mean_tokens: float

    def length(self, call_id: str, output_tokens: int, program: Program) -> LengthBound:
        return MeanLength(self.mean_output)

    def seconds(self, program: Program, speeds: Speeds) -> list[float]:
        return [self.mean_output * speeds.token_s] * len(program.stages)

    def least(self, program: Program, speeds: Speeds) -> list[float]:
        return self.seconds(program, speeds)

    def tokens(self, program: Program) -> float:
        return self.mean_tokens

    def later(self, program: Program, stage: int) -> ProgramCall:
        return ProgramCall(0, 0)

    @property
    def optimism(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class BlindToStages(Blind):
    """Nor does it know how many stages follow: the one that runs has all of the time that is left."""

    _begun: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def begins(self, program: Program, stage: int, at: float) -> None:
        self._begun[program.id] = stage + 1

    def closed(self, program: Program) -> None:
        self._begun.pop(program.id, None)

    def seconds(self, program: Program, speeds: Speeds) -> list[float]:
        before = self._begun.get(program.id, 1) - 1
        return [0.0] * before + [self.mean_output * speeds.token_s]
