"""Pattern graphs: what workflows of a tenant looked like, and which of them a running one is most like.

"Concord: SLO-Aware Optimization and Stateful Orchestration for LLM Systems", sec. 4.1, Fig. 4.2. A node is a call of a
kind (a stage of a client at a model, or a tool) with its input and output tokens. A call depends on those that its
client named or else, if it named none, on those that had ended when it began, so its *level* is one more than the
highest of theirs. A level's time is observed, waiting included: the pause since the level before it, and from the first
call's beginning to the last one's end.

A running workflow is compared with the beginning of each graph. Graphs whose beginning has another structure are left
out; of the others the most similar counts, by Gaussian kernels over output tokens (nodes) and input tokens (edges), in
logarithms. What its levels took from here on divides the time that is left (`controller.slo.stage_deadlines`).

A graph takes at most 200 bytes: MOST_NODES calls of five bytes each, with tokens in steps of 6 % and times in steps of
8 %; what comes after them is told by its time and its number of calls and levels.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from controller.core.errors import ConfigError
from controller.predict.array_files import from_file, to_file

MAGIC = b"slackline pattern graphs 1\n"
MOST_GRAPHS = 500  # the paper's; more hardly lower its error
MOST_NODES = 35
MOST_KINDS = 255
UNKNOWN = -2  # in place of the number of a kind that no graph has
WIDTH = 0.5  # of the kernels, in natural logarithms of tokens
TOKEN_STEPS = 17.0  # codes in a factor of e: exp(1/17) is 1.06
TIME_STEPS = 13.0
SHORTEST_S = 1e-3  # times below it count as it
OWN_SHARE = 0.5  # of a level's time that may not lie beside earlier levels, or it has no time of its own
_NODES = ("kind", "input", "output", "run", "gap")  # a byte for each call
_GRAPHS = ("offset", "used", "tail_s", "tail_nodes", "tail_levels")
_KERNEL = np.exp(-((np.arange(256) / TOKEN_STEPS / WIDTH) ** 2) / 2).astype(np.float32)

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class Call(NamedTuple):
    """A call of a workflow. `kind`: `kind_of` its model and stage. `ended` None: it runs, and its output is not known.
    Seconds on one clock. `number`: by which `parents` name it, 0: none does. `parents`: the calls it depends on, as its
    client told; None: not told, so times say."""

    kind: int
    began: float
    ended: float | None
    input_tokens: int
    output_tokens: int
    number: int = 0
    parents: tuple[int, ...] | None = None


class Level(NamedTuple):
    """Calls that depend on those of the level before. Seconds; `gap_s`: from the end of that one to the first call."""

    gap_s: float
    run_s: float


class Match(NamedTuple):
    """The graph that a running workflow is most like. `similarity`: 0 to 1. `candidates`: graphs that begin with its
    structure; 0: none does, and only what is alike was compared. `seconds`: of the level that its last call belongs to,
    from its beginning, and of those after it."""

    graph: int
    similarity: float
    candidates: int
    seconds: Sequence[float]


def kind_of(model: str, stage: str) -> int:
    """A number (32 bits) that stands for a stage's calls of a model. Which text they send says nothing of it."""
    return int.from_bytes(hashlib.blake2b(f"{model}\0{stage}".encode(), digest_size=4).digest())


def kind_of_tool(name: str) -> int:
    """The same for a tool of this name."""
    return kind_of("", f"tool {name}")  # no model is called so


def levels_of(calls: Sequence[Call]) -> list[int]:
    """The level of each call, from 0. `calls` in the order in which they began. Parents that are not among those
    before it say nothing; of a call that has no others, its time does."""
    levels: list[int] = []
    numbered: dict[int, int] = {}
    running: list[tuple[float, int]] = []  # a heap of when those before end, and their levels
    highest = -1  # level of those that have ended
    for call in calls:
        while running and running[0][0] <= call.began:
            highest = max(highest, heapq.heappop(running)[1])
        level = highest + 1
        if call.parents is not None:
            known = [numbered[parent] for parent in call.parents if parent in numbered]
            if known or not call.parents:
                level = max(known, default=-1) + 1
        levels.append(level)
        if call.number:
            numbered[call.number] = level
        if call.ended is not None:
            heapq.heappush(running, (call.ended, level))
    return levels


def times_of(calls: Sequence[Call], levels: Sequence[int]) -> list[Level]:
    """Of each level, for calls that have all ended. They add up to the whole workflow's time.

    A level that ran for the most part beside earlier ones has no time of its own: what it was longer than they were
    counts as the pause before the next level. The last one takes what is left.
    """
    spans: list[tuple[float, float]] = [(math.inf, -math.inf)] * (max(levels) + 1)
    for call, level in zip(calls, levels, strict=True):
        begins, ends = spans[level]
        spans[level] = min(begins, call.began), max(ends, call.ended or call.began)
    found: list[Level] = []
    upto = calls[0].began
    for level, (begins, ends) in enumerate(spans):
        began = max(upto, begins)
        ended = max(began, ends)
        if ended - began < OWN_SHARE * (ends - begins) and level + 1 < len(spans):
            found.append(Level(began - upto, 0.0))
            upto = began
        else:
            found.append(Level(began - upto, ended - began))
            upto = ended
    return found


def rest_of(calls: Sequence[Call], level: int) -> list[float]:
    """What a workflow that has ended took from the beginning of this level on: it, whose pause is over, and each of
    those after it."""
    return rests_of(calls)[level]


def rests_of(calls: Sequence[Call]) -> list[list[float]]:
    """`rest_of` each level."""
    times = times_of(*in_order(calls))
    later = [each.gap_s + each.run_s for each in times]
    return [[own.run_s, *later[level + 1 :]] for level, own in enumerate(times)]


def levels_in(calls: Sequence[Call]) -> list[float]:
    """When the first call of each level began."""
    begins: dict[int, float] = {}
    ordered, levels = in_order(calls)
    for call, level in zip(ordered, levels, strict=True):
        begins.setdefault(level, call.began)
    return list(begins.values())


def so_far(calls: Sequence[Call], now: float) -> list[Call]:
    """What was known of a workflow then: the calls that had begun, and the answers of those that had ended."""
    return [
        call if call.ended is not None and call.ended <= now else call._replace(ended=None, output_tokens=0)
        for call in calls
        if call.began <= now
    ]


@dataclass(frozen=True, slots=True)
class PatternGraph:
    """A workflow that has ended. The arrays have a code for each of its first MOST_NODES calls; `run` and `gap` are 0
    for calls of the same level as the one before. `tail_*`: of what follows them."""

    kinds: tuple[int, ...]  # of the calls in the arrays
    input: tuple[int, ...]
    output: tuple[int, ...]
    run: tuple[int, ...]
    gap: tuple[int, ...]
    tail_s: float
    tail_nodes: int
    tail_levels: int


def graph_of(calls: Sequence[Call]) -> PatternGraph:
    """Of a workflow whose calls have all ended. Raises ValueError for none, or one that runs."""
    if not calls or any(call.ended is None for call in calls):
        raise ValueError("a pattern graph is of calls that have all ended")
    ordered, levels = in_order(calls)
    times = times_of(ordered, levels)
    kept = ordered[:MOST_NODES]
    starts = [index == 0 or levels[index] != levels[index - 1] for index in range(len(kept))]
    last = levels[len(kept) - 1]
    return PatternGraph(
        tuple(call.kind for call in kept),
        tuple(_tokens(call.input_tokens) for call in kept),
        tuple(_tokens(call.output_tokens) for call in kept),
        tuple(_seconds(times[level].run_s) if start else 0 for level, start in zip(levels, starts, strict=False)),
        tuple(
            _seconds(times[level].gap_s) if start and times[level].gap_s > 0 else 0
            for level, start in zip(levels, starts, strict=False)
        ),
        math.fsum(each.gap_s + each.run_s for each in times[last + 1 :]),
        len(ordered) - len(kept),
        len(times) - last - 1,
    )


def in_order(calls: Sequence[Call]) -> tuple[list[Call], list[int]]:
    """By level, and in it by when they began."""
    begun = sorted(calls, key=lambda call: call.began)
    levels = levels_of(begun)
    places = sorted(range(len(begun)), key=lambda index: levels[index])  # stable
    return [begun[index] for index in places], [levels[index] for index in places]


@dataclass(frozen=True, eq=False)
class GraphSet:
    """The graphs of a tenant. `kinds`: the kind that each number of `kind` stands for. `offset`: where each graph's
    calls begin, and the end. `used`: how many workflows each stands for, those of the last hours counting more."""

    kinds: tuple[int, ...]
    kind: Bytes
    input: Bytes
    output: Bytes
    run: Bytes
    gap: Bytes
    offset: npt.NDArray[np.int32]
    used: Floats
    tail_s: Floats
    tail_nodes: npt.NDArray[np.uint16]
    tail_levels: npt.NDArray[np.uint16]
    about: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.used)

    @property
    def graph_bytes(self) -> float:
        """Of the largest graph."""
        nodes = int(np.diff(self.offset).max(initial=0))
        return float(nodes * len(_NODES) + sum(getattr(self, name).itemsize for name in _GRAPHS))

    @cached_property
    def _rows(self) -> Rows:
        return Rows.of(self)

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return {kind: number for number, kind in enumerate(self.kinds)}

    def prepare(self) -> None:
        """Lay out what matching reads now, and not for the first request."""
        self._rows, self._numbers  # noqa: B018

    def match(self, calls: Sequence[Call], more: int = 0) -> Match | None:
        """The most similar graph for a workflow whose first calls are these, and `more` that followed them one after
        another. The last of all begins now. None: its structure is new."""
        ordered, levels = in_order(calls)
        current = max(ordered, key=lambda call: call.began)
        known = ordered[:MOST_NODES]
        numbers = np.array([self._numbers.get(call.kind, UNKNOWN) for call in known], dtype=np.int16)
        level = levels[-1] + more if more else levels[ordered.index(current)]
        beyond = (len(ordered) - len(known) + more, levels[-1] - levels[len(known) - 1] + more)
        starts = np.array([index == 0 or levels[index] != levels[index - 1] for index in range(len(known))])
        rows = self._rows.beginning_as(numbers, starts, beyond)
        if len(rows):
            similarities = self._rows.similarities(rows, known)
        else:
            similarities = self._rows.partly(known, numbers, starts)
            similarities[self._rows.levels <= level] = 0.0
        found = rows if len(rows) else np.arange(len(self))
        best = int(np.lexsort((-self.used[found], -similarities))[0])
        graph = int(found[best])
        seconds = self.seconds_from(graph, level)
        if seconds is None or seconds[0] <= SHORTEST_S or not similarities[best] > 0:
            return None
        return Match(graph, float(similarities[best]), len(rows), seconds)

    def levels(self, graph: int) -> list[Level]:
        """Of all its calls; those that are not stored one by one are equally long."""
        begin, end = int(self.offset[graph]), int(self.offset[graph + 1])
        found = [
            Level(_of_seconds(int(gap)), _of_seconds(int(run)))
            for gap, run in zip(self.gap[begin:end], self.run[begin:end], strict=True)
            if run
        ]
        more = int(self.tail_levels[graph])
        return found + [Level(0.0, float(self.tail_s[graph]) / max(1, more))] * more

    def seconds_from(self, graph: int, level: int) -> list[float] | None:
        """Of this level, whose pause is over, and of those after it; None: the graph ends before it."""
        levels = self.levels(graph)[level:]
        return [levels[0].run_s, *(each.gap_s + each.run_s for each in levels[1:])] if levels else None

    def seconds_before(self, match: Match) -> list[float]:
        """Of the levels before the one that the match begins with, and the pause before that one."""
        levels = self.levels(match.graph)
        at = len(levels) - len(match.seconds)
        before = [each.gap_s + each.run_s for each in levels[:at]]
        return [*before, levels[at].gap_s] if levels[at].gap_s > 0 else before

    def tokens_after(self, graph: int, level: int) -> tuple[float, float]:
        """Input and output tokens of the calls of later levels that are stored one by one."""
        begin, end = int(self.offset[graph]), int(self.offset[graph + 1])
        later = np.cumsum(self.run[begin:end] > 0) > level + 1
        inputs, outputs = (of_tokens(codes[begin:end][later]) for codes in (self.input, self.output))
        return inputs, outputs

    # ---- as a file --------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        arrays = {name: getattr(self, name) for name in (*_NODES, *_GRAPHS)}
        return to_file(MAGIC, {"kinds": self.kinds, "about": dict(self.about)}, arrays)

    @classmethod
    def from_bytes(cls, content: bytes) -> GraphSet:
        """Raises ConfigError for what is no set of this version, damaged, too large or inconsistent."""
        told, arrays = from_file(MAGIC, "set of pattern graphs", (*_NODES, *_GRAPHS), content)
        try:
            found = cls(tuple(map(int, told["kinds"])), **arrays, about=dict(told["about"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the set of pattern graphs cannot be read: {error}") from error
        found._check()
        return found

    def _check(self) -> None:
        """Raises ConfigError where the arrays do not fit each other."""
        count, nodes = len(self.used), len(self.kind)
        arrays = [getattr(self, name) for name in (*_NODES, *_GRAPHS)]
        alike = (
            all(each.ndim == 1 for each in arrays)
            and all(getattr(self, name).dtype == np.uint8 for name in _NODES)
            and all(len(getattr(self, name)) == nodes for name in _NODES)
            and all(len(getattr(self, name)) == count for name in _GRAPHS if name != "offset")
            and len(self.offset) == count + 1
            and self.offset.dtype == np.int32
        )
        if not (alike and 1 <= count <= MOST_GRAPHS and 1 <= len(self.kinds) <= MOST_KINDS):
            raise ConfigError("the set of pattern graphs has arrays of wrong lengths")
        sizes = np.diff(self.offset)
        within = (
            self.offset[0] == 0
            and self.offset[-1] == nodes
            and bool(((sizes >= 1) & (sizes <= MOST_NODES)).all())
            and bool((self.kind < len(self.kinds)).all())
            and bool((self.run[self.offset[:-1]] > 0).all())
            and bool(np.isfinite(self.tail_s).all() and (self.tail_s >= 0).all())
            and bool(np.isfinite(self.used).all())
        )
        if not within:
            raise ConfigError("the set of pattern graphs points outside of itself")


class GraphsInForce(NamedTuple):
    """A version of a tenant's graphs."""

    version: int
    graphs: GraphSet


@dataclass(frozen=True, eq=False)
class Rows:
    """The calls of graphs as rows of equal length, for comparing many at once. `kind` is -1 behind a graph's end."""

    kind: npt.NDArray[np.int16]
    start: npt.NDArray[np.bool_]  # of a level
    input: npt.NDArray[np.int16]
    output: npt.NDArray[np.int16]
    nodes: npt.NDArray[np.int32]
    tail_nodes: npt.NDArray[np.int32]
    tail_levels: npt.NDArray[np.int32]
    levels: npt.NDArray[np.int32]

    @classmethod
    def of(cls, graphs: GraphSet) -> Rows:
        sizes = np.diff(graphs.offset)
        place = np.arange(int(sizes.max()))
        within = place < sizes[:, None]
        index = np.where(within, graphs.offset[:-1, None] + place, 0)
        kind = np.where(within, graphs.kind[index], -1).astype(np.int16)
        tails = (graphs.tail_nodes.astype(np.int32), graphs.tail_levels.astype(np.int32))
        start = within & (graphs.run[index] > 0)
        tokens = (graphs.input[index].astype(np.int16), graphs.output[index].astype(np.int16))
        return cls(kind, start, *tokens, sizes, *tails, levels=start.sum(axis=1).astype(np.int32) + tails[1])

    def beginning_as(
        self, kinds: npt.NDArray[np.int16], starts: npt.NDArray[np.bool_], beyond: tuple[int, int]
    ) -> npt.NDArray[np.intp]:
        """The graphs whose first calls have these kinds and levels. `beyond`: calls and levels that follow them."""
        count = len(kinds)
        if count > self.kind.shape[1]:
            return np.array([], dtype=np.intp)
        alike = (self.kind[:, :count] == kinds).all(axis=1) & (self.start[:, :count] == starts).all(axis=1)
        if beyond[0]:
            alike &= (self.tail_nodes >= beyond[0]) & (self.tail_levels >= beyond[1])
        return np.flatnonzero(alike)

    def similarities(self, rows: npt.NDArray[np.intp], calls: Sequence[Call]) -> Floats:
        """Of each row to these calls, which it begins with. Calls that run are compared by their input alone."""
        count = len(calls)
        inputs = np.array([_tokens(call.input_tokens) for call in calls], dtype=np.int16)
        edges = _KERNEL[np.abs(self.input[rows, :count] - inputs)].sum(axis=1)
        ended = [index for index, call in enumerate(calls) if call.ended is not None]
        outputs = np.array([_tokens(calls[index].output_tokens) for index in ended], dtype=np.int16)
        nodes = _KERNEL[np.abs(self.output[rows][:, ended] - outputs)].sum(axis=1) if ended else 0.0
        return np.asarray((edges + nodes) / (count + len(ended)), dtype=np.float32)

    def partly(self, calls: Sequence[Call], kinds: npt.NDArray[np.int16], starts: npt.NDArray[np.bool_]) -> Floats:
        """How similar each graph is to these calls, where those of the same place, kind and level alone are alike."""
        count = min(len(calls), self.kind.shape[1])
        same = (self.kind[:, :count] == kinds[:count]) & (self.start[:, :count] == starts[:count])
        inputs = np.array([_tokens(call.input_tokens) for call in calls[:count]], dtype=np.int16)
        outputs = np.array([_tokens(call.output_tokens) for call in calls[:count]], dtype=np.int16)
        ended = np.array([call.ended is not None for call in calls[:count]])
        edges = _KERNEL[np.abs(self.input[:, :count] - inputs)]
        nodes = _KERNEL[np.abs(self.output[:, :count] - outputs)] * ended
        return np.asarray(((edges + nodes) * same).sum(axis=1) / (len(calls) + ended.sum()), dtype=np.float32)

    def whole(self, row: int) -> Floats:
        """How similar each graph is to this one, over all calls of the longer one: behind the first call where their
        structures differ, nothing is."""
        size = int(self.nodes[row])
        same = (self.kind[:, :size] == self.kind[row, :size]) & (self.start[:, :size] == self.start[row, :size])
        same = np.logical_and.accumulate(same, axis=1)
        edges = _KERNEL[np.abs(self.input[:, :size] - self.input[row, :size])]
        nodes = _KERNEL[np.abs(self.output[:, :size] - self.output[row, :size])]
        longest = np.maximum(self.nodes + self.tail_nodes, size + int(self.tail_nodes[row]))
        tails = np.minimum(self.tail_nodes, int(self.tail_nodes[row])) * same[:, -1]
        return np.asarray((((edges + nodes) * same).sum(axis=1) / 2 + tails) / longest, dtype=np.float32)


def set_of(graphs: Sequence[PatternGraph], used: Sequence[float], about: Mapping[str, Any]) -> GraphSet:
    """Raises ValueError for no graph, or more than MOST_KINDS kinds of calls."""
    kinds = sorted({kind for graph in graphs for kind in graph.kinds})
    if not graphs or len(kinds) > MOST_KINDS:
        raise ValueError(f"{len(graphs)} graphs with {len(kinds)} kinds of calls; at most {MOST_KINDS} kinds")
    numbers = {kind: number for number, kind in enumerate(kinds)}

    def codes(name: str) -> Bytes:
        return np.array([code for graph in graphs for code in getattr(graph, name)], dtype=np.uint8)

    return GraphSet(
        kinds=tuple(kinds),
        kind=np.array([numbers[kind] for graph in graphs for kind in graph.kinds], dtype=np.uint8),
        input=codes("input"),
        output=codes("output"),
        run=codes("run"),
        gap=codes("gap"),
        offset=np.cumsum([0, *(len(graph.kinds) for graph in graphs)]).astype(np.int32),
        used=np.array(used, dtype=np.float32),
        tail_s=np.array([graph.tail_s for graph in graphs], dtype=np.float32),
        tail_nodes=np.array([min(graph.tail_nodes, 65_535) for graph in graphs], dtype=np.uint16),
        tail_levels=np.array([min(graph.tail_levels, 65_535) for graph in graphs], dtype=np.uint16),
        about=dict(about),
    )


def _tokens(tokens: int) -> int:
    return min(255, round(TOKEN_STEPS * math.log1p(max(0, tokens))))


def of_tokens(codes: Bytes) -> float:
    """Of all of them together."""
    return float(np.expm1(codes / TOKEN_STEPS).sum())


def _seconds(seconds: float) -> int:
    """1 to 255."""
    return min(255, 1 + round(TIME_STEPS * math.log(max(seconds, SHORTEST_S) / SHORTEST_S)))


def _of_seconds(code: int) -> float:
    return SHORTEST_S * math.exp((code - 1) / TIME_STEPS) if code else 0.0
