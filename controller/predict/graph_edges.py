"""A pattern graph spelled out, for people: its calls by level, its edges, and what each level took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from controller.predict.pattern_graphs import GraphSet, Level, of_tokens


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A call. `number`: from 1, in the order of levels. `kind`: stage and model, or a tool; its number in hex where
    nobody knows of what it is. Tokens as they are stored, in steps of 6 %."""

    number: int
    level: int
    kind: str
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class SpelledGraph:
    """`used`: how many workflows it stands for, those of the last hours counting more. `edges`: pairs of numbers of
    nodes: each call of a level leads to each of the next, since graphs store levels and not the parents that clients
    name. `more_calls`, `more_levels`: that follow and are not stored one by one."""

    number: int
    used: float
    nodes: Sequence[GraphNode]
    edges: Sequence[tuple[int, int]]
    levels: Sequence[Level]
    more_calls: int
    more_levels: int
    more_s: float

    @property
    def seconds(self) -> float:
        """Of the whole workflow."""
        return sum(each.gap_s + each.run_s for each in self.levels) + self.more_s

    def before(self, node: GraphNode) -> list[int]:
        """The calls that it follows."""
        return [source for source, target in self.edges if target == node.number]


def most_used(graphs: GraphSet, names: Mapping[int, str], most: int) -> list[SpelledGraph]:
    """Those that stand for most workflows, first. `names`: of kinds."""
    order = np.argsort(-graphs.used, kind="stable")[:most]
    return [_spelled(graphs, int(graph), names) for graph in order]


def _spelled(graphs: GraphSet, graph: int, names: Mapping[int, str]) -> SpelledGraph:
    begin, end = int(graphs.offset[graph]), int(graphs.offset[graph + 1])
    nodes: list[GraphNode] = []
    level = 0
    for number, index in enumerate(range(begin, end), 1):
        level += bool(graphs.run[index])
        kind = graphs.kinds[int(graphs.kind[index])]
        tokens = (round(of_tokens(codes[index : index + 1])) for codes in (graphs.input, graphs.output))
        nodes.append(GraphNode(number, level, names.get(kind, f"{kind:08x}"), *tokens))
    by_level: dict[int, list[int]] = {}
    for node in nodes:
        by_level.setdefault(node.level, []).append(node.number)
    edges = [(source, target) for each in range(1, level) for source in by_level[each] for target in by_level[each + 1]]
    more = int(graphs.tail_levels[graph])
    stored = graphs.levels(graph)[:level]
    return SpelledGraph(
        graph + 1, float(graphs.used[graph]), nodes, edges, stored, int(graphs.tail_nodes[graph]), more,
        float(graphs.tail_s[graph]),
    )  # fmt: skip
