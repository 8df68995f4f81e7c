"""What Concord's analyser knows of programs: a length forest and pattern graphs, both trained on other programs.

The same code as in gateways: `AnswerLengths` foretells an answer from numbers that a gateway reads of a request or
remembers, and bounds it again every 50 tokens; `GraphSet` matches a program's calls so far at the beginning of each
stage. An application is a tenant with one kind of call, so that stages are told apart by how many calls are sent at
once. Calls of one stage are sent together and matched together.

`Exchanged` takes single predictions from the truth, which says what each of them costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from controller.core.errors import ConfigError
from controller.core.estimates import LengthBound
from controller.predict.answer_lengths import AnswerBounds, AnswerLengths, Foretold, Kind, LengthsInForce, with_bounds
from controller.predict.foresight import REFINED_EVERY, KnownLength
from controller.predict.length_forest import LengthForest
from controller.predict.pattern_graphs import Call, GraphSet, Level, kind_of
from controller.simulator.workloads.foresight import Oracle
from controller.simulator.workloads.programs import Program, ProgramCall, Speeds

MODEL = "model"  # all programs of a run call the same
LENGTH, GRAPH, GIVING_UP = "length", "graph", "giving_up"
PARTS = (LENGTH, GRAPH, GIVING_UP)
NONE_LATER = ProgramCall(0, 0)


@dataclass(frozen=True, slots=True)
class TrainedAnalyser:
    """`graphs`: by application. `token_s`: seconds per token at which their times were recorded; None: under the load
    that is simulated, so that they need no factor. `optimism`: nine of ten recorded programs needed more than this
    share of the time that graphs foretold for their later stages.
    """

    forest: LengthForest
    graphs: Mapping[str, GraphSet]
    token_s: float | None
    optimism: float


@dataclass(slots=True)
class ForestBounds:
    """Bounds of one answer, asked again every 50 tokens at the level that holds then. `judging`: see `with_bounds`."""

    lengths: AnswerLengths
    foretold: Foretold
    judging: tuple[AnswerBounds, ...] = ()
    _known: int = field(default=-1, init=False)
    _bounds: tuple[int, int] = field(default=(1, 1), init=False)

    def upper(self, produced: int) -> int:
        return max(produced + 1, self._at(produced)[1])

    def lower(self, produced: int) -> int:
        return max(produced + 1, self._at(produced)[0])

    def _at(self, produced: int) -> tuple[int, int]:
        known = produced // REFINED_EVERY
        if known != self._known:
            self._known = known
            at = known * REFINED_EVERY
            if not at:
                self._bounds = self.foretold.bounds or (1, 1)
                return self._bounds
            found = self.lengths.bounds_again(MODEL, self.foretold, at)
            self._bounds = (at + 1, at + 1) if found is None else (found.lower, found.upper)
            if found is not None:
                self.judging = with_bounds(self.judging, found)
        return self._bounds


@dataclass(frozen=True, slots=True)
class TwoBounds:
    """The upper bound of one and the lower bound of another."""

    most: LengthBound
    least: LengthBound

    def upper(self, produced: int) -> int:
        return self.most.upper(produced)

    def lower(self, produced: int) -> int:
        return self.least.lower(produced)


@dataclass(slots=True)
class _Seen:
    """Of a program that runs. `calls`: by id. `levels`: of the graph that it is most like."""

    calls: dict[str, Call] = field(default_factory=dict)
    stage: int = 0
    levels: Sequence[Level] = ()
    later: ProgramCall = NONE_LATER


class Trained:
    """One run's use of what was trained; learns as a gateway does while it serves. `recorded`: the calls of programs
    that ended in time, by application, for training; late ones waited until no other needed the time, so their times do
    not show what a stage needs.
    """

    def __init__(self, trained: TrainedAnalyser) -> None:
        self.trained = trained
        self.recorded: dict[str, list[list[Call]]] = {}
        self.lengths = AnswerLengths()
        self.lengths.take({MODEL: LengthsInForce(1, trained.forest)})
        self._seen: dict[str, _Seen] = {}
        self._bounds: dict[str, ForestBounds] = {}  # by call

    @property
    def learns(self) -> bool:
        return True

    @property
    def optimism(self) -> float:
        return self.trained.optimism

    def length(self, call_id: str, output_tokens: int, program: Program) -> LengthBound:
        return self._bounds[call_id]

    def begins(self, program: Program, stage: int, at: float) -> None:
        seen = self._seen.setdefault(program.id, _Seen())
        seen.stage = stage
        kind = kind_of(MODEL, program.app)
        for index, call in enumerate(program.stages[stage].calls):
            call_id = f"{program.id}/{stage}.{index}"
            workflow = "" if program.single else program.id
            foretold = self.lengths.foretell(_kind(program), workflow, call.prompt_tokens, None)
            self._bounds[call_id] = ForestBounds(self.lengths, foretold)
            seen.calls[call_id] = Call(kind, at, None, call.prompt_tokens, 0)
        if not program.single:
            self._match(program, seen)

    def _match(self, program: Program, seen: _Seen) -> None:
        """A program that is like no graph counts as in its last stage."""
        seen.levels, seen.later = (), NONE_LATER
        graphs = self.trained.graphs.get(program.app)
        match = graphs.match(list(seen.calls.values())) if graphs is not None else None
        if graphs is None or match is None:
            return
        seen.levels = graphs.levels(match.graph)
        seen.later = ProgramCall(*(round(each) for each in graphs.tokens_after(match.graph, seen.stage)))

    def seconds(self, program: Program, speeds: Speeds) -> list[float]:
        seen = self._seen[program.id]
        if len(seen.levels) <= seen.stage:
            return [1.0] * (seen.stage + 1)  # only shares count, and all of the time that is left is this stage's
        recorded_s = self.trained.token_s
        factor = 1.0 if recorded_s is None else speeds.token_s / recorded_s
        found = [each.gap_s + each.run_s * factor for each in seen.levels]
        found[seen.stage] -= seen.levels[seen.stage].gap_s  # it is over
        return found

    def least(self, program: Program, speeds: Speeds) -> list[float]:
        return self.seconds(program, speeds)

    def tokens(self, program: Program) -> float:
        seen = self._seen.get(program.id)
        if seen is None:
            return 1.0  # before it arrived, when nobody asks for it yet
        known = sum(
            call.input_tokens
            + (call.output_tokens if call.ended is not None else self._bounds[call_id].foretold.expected)
            for call_id, call in seen.calls.items()
        )
        return float(known + sum(seen.later))

    def later(self, program: Program, stage: int) -> ProgramCall:
        return self._seen[program.id].later

    def ended(self, program: Program, call_id: str, began: float, now: float, whole: bool) -> None:
        bounds, seen = self._bounds.pop(call_id, None), self._seen[program.id]
        if bounds is None or not whole:
            return
        stage, index = map(int, call_id.rpartition("/")[2].split("."))
        tokens = program.stages[stage].calls[index].output_tokens
        seen.calls[call_id] = seen.calls[call_id]._replace(began=began, ended=now, output_tokens=tokens)
        workflow = "" if program.single else program.id
        kind = _kind(program)
        self.lengths.observe(kind, workflow, bounds.foretold, tokens, ended=True, again=bounds.judging)

    def closed(self, program: Program) -> None:
        seen = self._seen.pop(program.id, None)
        if seen is None:
            return
        for call_id in seen.calls:
            self._bounds.pop(call_id, None)
        calls = list(seen.calls.values())
        deadline = program.targets.deadline_s
        if program.single or deadline is None or seen.stage < len(program.stages) - 1:
            return
        if all(call.ended is not None and call.ended <= program.at + deadline for call in calls):
            self.recorded.setdefault(program.app, []).append(calls)


class Exchanged:
    """`own` with `parts` of its predictions exchanged for the truth. With all three it is the oracle.

    `length`: the upper bound. `graph`: seconds and tokens of stages. `giving_up`: the least length and the least
    seconds, by which a program is given up.
    """

    def __init__(self, own: Trained, parts: Sequence[str]) -> None:
        unknown = sorted(set(parts) - set(PARTS))
        if unknown:
            raise ConfigError(f"unknown part {unknown[0]!r}; valid: {', '.join(PARTS)}", field="parts")
        self.own = own
        self.parts = frozenset(parts)
        self._truth = Oracle()

    @property
    def learns(self) -> bool:
        return True

    @property
    def optimism(self) -> float:
        return self._truth.optimism if GIVING_UP in self.parts else self.own.optimism

    def length(self, call_id: str, output_tokens: int, program: Program) -> LengthBound:
        told, known = self.own.length(call_id, output_tokens, program), KnownLength(output_tokens)
        return TwoBounds(known if LENGTH in self.parts else told, known if GIVING_UP in self.parts else told)

    def seconds(self, program: Program, speeds: Speeds) -> list[float]:
        return self._truth.seconds(program, speeds) if GRAPH in self.parts else self.own.seconds(program, speeds)

    def least(self, program: Program, speeds: Speeds) -> list[float]:
        return self._truth.seconds(program, speeds) if GIVING_UP in self.parts else self.own.least(program, speeds)

    def tokens(self, program: Program) -> float:
        exchanged = LENGTH if program.single else GRAPH
        return self._truth.tokens(program) if exchanged in self.parts else self.own.tokens(program)

    def later(self, program: Program, stage: int) -> ProgramCall:
        return self._truth.later(program, stage) if GRAPH in self.parts else self.own.later(program, stage)

    def begins(self, program: Program, stage: int, at: float) -> None:
        self.own.begins(program, stage, at)

    def ended(self, program: Program, call_id: str, began: float, now: float, whole: bool) -> None:
        self.own.ended(program, call_id, began, now, whole)

    def closed(self, program: Program) -> None:
        self.own.closed(program)


def _kind(program: Program) -> Kind:
    return program.app, program.kind, MODEL
