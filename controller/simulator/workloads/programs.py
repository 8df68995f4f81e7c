"""Programs: stages of parallel calls, each released when the stage before it has ended and its tool has run.

Concord ch. 3 and sec. 4.1: a compound request earns the prompt and output tokens of *all* its calls if the last one
ends by the end-to-end deadline, and nothing otherwise. Each stage has an amortised deadline, phi(s) x D, where phi is
the accumulated share of time up to stage s (worked example C6). A single request is a program of one call, which is
judged by its own targets (paced token by token, or a deadline).

Schedulers get predictions of lengths and graphs (`Foresight`), never the truth, except with the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from controller.core.errors import ConfigError
from controller.core.estimates import Estimate, LengthBound
from controller.core.types import Outcome, Targets
from controller.simulator.report.results import ProgramRecord
from controller.simulator.workloads.demand import Demand
from controller.simulator.workloads.mixes import PATIENT_S
from controller.simulator.workloads.stage_pace import StagePace
from controller.slo.stage_deadlines import accumulated_shares, checked_rule, stage_due


class ProgramCall(NamedTuple):
    """One LLM call; lengths in tokens."""

    prompt_tokens: int
    output_tokens: int


class ProgramStage(NamedTuple):
    """Parallel calls. `tool_s`: time of the tool between the end of these calls and the next stage."""

    calls: tuple[ProgramCall, ...]
    tool_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Program:
    """`targets`: those of a single paced request (no deadline), or the end-to-end deadline of the whole. `app`: who
    sends it, as a gateway knows by the key.
    """

    id: str
    at: float
    kind: str
    stages: tuple[ProgramStage, ...]
    targets: Targets
    app: str = ""

    def __post_init__(self) -> None:
        if not self.stages or not all(stage.calls for stage in self.stages):
            raise ConfigError(f"program {self.id!r} needs stages, each with calls", field="stages")
        if self.targets.deadline_s is None and (len(self.stages) > 1 or len(self.stages[0].calls) > 1):
            raise ConfigError(f"program {self.id!r} of several calls needs a deadline", field="deadline_s")

    @property
    def tokens(self) -> int:
        return sum(call.prompt_tokens + call.output_tokens for stage in self.stages for call in stage.calls)

    @property
    def single(self) -> bool:
        return len(self.stages) == 1 and len(self.stages[0].calls) == 1


def calls_after(program: Program, stage: int, factor: float = 1.0) -> ProgramCall:
    """All later calls as one: their tokens, times `factor`."""
    calls = [call for each in program.stages[stage + 1 :] for call in each.calls]
    prompt, output = sum(call.prompt_tokens for call in calls), sum(call.output_tokens for call in calls)
    return ProgramCall(round(factor * prompt), round(factor * output))


class Speeds(NamedTuple):
    """Seconds per token, for the shares of stages and the least time that a program needs."""

    token_s: float = 0.03
    prefill_s: float = 1e-4

    def times(self, factor: float) -> Speeds:
        return Speeds(factor * self.token_s, factor * self.prefill_s)


def longest_call_s(stage: ProgramStage, speeds: Speeds) -> float:
    return max(call.output_tokens * speeds.token_s + call.prompt_tokens * speeds.prefill_s for call in stage.calls)


def stage_seconds(stage: ProgramStage, speeds: Speeds) -> float:
    """Seconds of a stage: its longest call and its tool."""
    return longest_call_s(stage, speeds) + stage.tool_s


class Foresight(Protocol):
    """What a predictor says about a program. Deterministic for a program or call, and what was observed before."""

    def length(self, call_id: str, output_tokens: int, program: Program) -> LengthBound:
        """Of the call with this id, which is the program's id, "/", the stage's number, "." and its number there."""
        ...

    def seconds(self, program: Program, speeds: Speeds) -> list[float]:
        """Predicted seconds of each stage; as many as the predictor expects, but at least those that have begun."""
        ...

    def least(self, program: Program, speeds: Speeds) -> list[float]:
        """The same, for what later stages need at least (before `optimism`), by which a program is given up."""
        ...

    def tokens(self, program: Program) -> float:
        """Predicted tokens of all calls of the program."""
        ...

    def later(self, program: Program, stage: int) -> ProgramCall:
        """Predicted prompt and output tokens of all calls after this stage."""
        ...

    @property
    def optimism(self) -> float:
        """The factor on `least` for the least time of stages."""
        ...

    @property
    def learns(self) -> bool:
        """Whether what it says changes with what it observes, so that it is asked again when a call arrives."""
        ...

    def begins(self, program: Program, stage: int, at: float) -> None:
        """The calls of this stage are sent now (seconds)."""
        ...

    def ended(self, program: Program, call_id: str, began: float, now: float, whole: bool) -> None:
        """A call ended. `whole`: with its last token."""
        ...

    def closed(self, program: Program) -> None:
        """Nothing of the program follows."""
        ...


@dataclass(slots=True)
class _Open:
    program: Program
    tokens: float
    seconds: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    least: list[float] = field(default_factory=list)  # least seconds of each stage
    stage: int = 0  # the next stage
    running: int = 0
    lost: bool = False
    earned: int = 0
    calls: int = 0
    ended_at: float = 0.0
    attained: bool = True


@dataclass(slots=True)
class Programs:
    """The programs of one run.

    `count`: what goodput is counted in, "tokens" or "requests" (then each program is worth 1). `pace`: learns how much
    longer than at `speeds` stages take; None: they take that long. `stage_deadlines`: the rule that divides the
    deadline among stages (controller/slo/stage_deadlines.py). `told`: the dispatcher is told bounds of each answer's
    length, as in a gateway with an analyser; without, it learns the mean of each class.
    """

    programs: Sequence[Program]
    foresight: Foresight
    speeds: Speeds = field(default_factory=Speeds)
    count: str = "tokens"
    pace: StagePace | None = None
    stage_deadlines: str = "accumulated"
    told: bool = False
    records: list[ProgramRecord] = field(default_factory=list)
    _open: dict[str, _Open] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.count not in ("tokens", "requests"):
            raise ConfigError(f"unknown count {self.count!r}; valid: requests, tokens", field="count")
        if len({program.id for program in self.programs}) != len(self.programs):
            raise ConfigError("two programs have the same id", field="programs")
        checked_rule(self.stage_deadlines)

    def first(self) -> list[Demand]:
        """Calls of the first stages, with which the workload begins."""
        found: list[Demand] = []
        for program in self.programs:
            opened = self._open[program.id] = _Open(program, self.foresight.tokens(program))
            found += self._release(opened, program.at)
        return found

    def arrived(self, demand: Demand) -> Demand:
        """A call of `first`, with the predictions of its arrival time."""
        opened = self._open.get(demand.workflow)
        if opened is None or not (self.foresight.learns or (self.pace is not None and not opened.program.single)):
            return demand
        self._look_ahead(opened, 0, demand.at)
        return self._demand(opened, 0, demand.id, ProgramCall(demand.prompt_tokens, demand.output_tokens), demand.at)

    def _look_ahead(self, opened: _Open, stage: int, at: float) -> None:
        self.foresight.begins(opened.program, stage, at)
        if self.foresight.learns:
            opened.tokens = self.foresight.tokens(opened.program)
        speeds = self.speeds.times(self.pace.factor) if self.pace is not None else self.speeds
        opened.seconds = self.foresight.seconds(opened.program, speeds)
        opened.shares = accumulated_shares(opened.seconds)
        lowest = self.speeds.times(self.pace.lowest) if self.pace is not None else self.speeds
        opened.least = self.foresight.least(opened.program, lowest)

    def ended(self, demand: Demand, outcome: Outcome, attained: bool, goodput: int, now: float) -> list[Demand]:
        """A call ended: the calls of the next stage, if it was the last of its stage. A lost call loses the program."""
        opened = self._open.get(demand.workflow)
        if opened is None:
            return []
        program = opened.program
        opened.running -= 1
        opened.calls += 1
        opened.lost |= outcome is not Outcome.OK
        opened.ended_at = now
        self.foresight.ended(program, demand.id, demand.at, now, outcome is Outcome.OK)
        if program.single:
            opened.earned, opened.attained = goodput, attained
        if opened.running:
            return []
        done = opened.stage == len(program.stages)
        if opened.lost or done:
            self._close(opened)
            return []
        return self._release(opened, now + program.stages[opened.stage - 1].tool_s)

    def finished(self, now: float) -> list[ProgramRecord]:
        """The run has ended: open programs are lost."""
        for opened in list(self._open.values()):
            opened.lost, opened.ended_at = True, now
            self._close(opened)
        return self.records

    def _close(self, opened: _Open) -> None:
        program, took = opened.program, opened.ended_at - opened.program.at
        deadline = program.targets.deadline_s
        if not program.single:
            opened.attained = not opened.lost and deadline is not None and took <= deadline + 1e-9
            opened.earned = program.tokens if opened.attained else 0
            if self.pace is not None and opened.attained:
                alone = math.fsum(longest_call_s(stage, self.speeds) for stage in program.stages)
                self.pace.observe(took - math.fsum(stage.tool_s for stage in program.stages[:-1]), alone)
        self.records.append(
            ProgramRecord(
                program.id, program.at, program.kind, len(program.stages), opened.calls, program.tokens,
                None if opened.lost else took, deadline, opened.attained and not opened.lost, opened.earned,
            )
        )  # fmt: skip
        self.foresight.closed(program)
        del self._open[program.id]

    def _release(self, opened: _Open, at: float) -> list[Demand]:
        self._look_ahead(opened, opened.stage, at)
        number, stage = opened.stage, opened.program.stages[opened.stage]
        found = [
            self._demand(opened, number, f"{opened.program.id}/{number}.{index}", call, at)
            for index, call in enumerate(stage.calls)
        ]
        opened.stage += 1
        opened.running = len(found)
        return found

    def _demand(self, opened: _Open, stage: int, call_id: str, call: ProgramCall, at: float) -> Demand:
        program, deadline = opened.program, opened.program.targets.deadline_s
        length = self.foresight.length(call_id, call.output_tokens, program)
        program_id = "" if program.single else program.id
        if deadline is None:
            targets = program.targets
            paced_end = at + targets.ttft_s + (length.upper(0) - 1) * targets.tpot_s
            paced = self.count == "tokens"
            estimate = Estimate(
                length, 1.0, each_token=paced, due=at + targets.ttft_s, latest=paced_end, likely_latest=paced_end
            )
        else:
            whole, share = math.fsum(opened.seconds), opened.shares[stage]
            due = stage_due(self.stage_deadlines, opened.seconds, stage, program.at, at, deadline)
            end, later_s = program.at + deadline, (1.0 - share) * whole
            latest = end - math.fsum(opened.least[stage + 1 :]) * self.foresight.optimism
            worth = opened.tokens if self.count == "tokens" else 1.0
            later = self.foresight.later(program, stage)
            estimate = Estimate(
                length, worth, due=due, latest=latest, program=program_id, likely_latest=end - later_s,
                later_output=later.output_tokens, later_prompt=later.prompt_tokens,
            )  # fmt: skip
            left = max(1e-3, due - at)
            targets = Targets(left, left, left, PATIENT_S)
        return Demand(
            id=call_id,
            at=at,
            prompt_tokens=call.prompt_tokens,
            output_tokens=call.output_tokens,
            targets=targets,
            slo_class=program.kind,
            workflow=program.id,
            workflow_left_s=None if program.single or deadline is None else program.at + deadline - at,
            estimate=estimate,
            bounds=(length.lower(0), length.upper(0)) if self.told else None,
            may_defer=not program.single,  # a late stage loses nothing yet, since only the whole has a deadline
        )
