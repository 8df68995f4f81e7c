"""A pattern graph spelled out: levels, edges between them, names where they are known."""

from __future__ import annotations

from controller.predict.graph_edges import most_used
from controller.predict.pattern_graphs import MOST_NODES, graph_of, set_of
from tests.controller.predict.test_pattern_graphs import PLAN, SEARCH, chain, workflow


def test_each_call_of_a_level_leads_to_each_of_the_next() -> None:
    graphs = set_of([graph_of(chain([2.0])), graph_of(workflow())], [1.0, 3.0], {})
    first, second = most_used(graphs, {PLAN: "plan at big", SEARCH: "search at small"}, 5)
    assert (first.number, second.number, first.used) == (2, 1, 3.0)
    assert [node.level for node in first.nodes] == [1, 2, 2, 2, 3]
    assert first.edges == [(1, 2), (1, 3), (1, 4), (2, 5), (3, 5), (4, 5)]
    assert first.before(first.nodes[4]) == [2, 3, 4]
    assert [node.kind for node in first.nodes[:2]] == ["plan at big", "search at small"]
    assert len(first.nodes[4].kind) == 8, "a number in hex"
    assert abs(first.nodes[0].input_tokens - 500) <= 0.06 * 500
    assert abs(first.seconds - 11.0) < 1.0
    assert (first.more_calls, second.edges) == (0, [])


def test_what_is_not_stored_one_by_one_is_counted_alone() -> None:
    graphs = set_of([graph_of(chain([1.0] * (MOST_NODES + 5)))], [1.0], {})
    (found,) = most_used(graphs, {}, 1)
    assert (len(found.nodes), len(found.levels), found.more_calls, found.more_levels) == (MOST_NODES, MOST_NODES, 5, 5)
    assert found.edges[-1] == (MOST_NODES - 1, MOST_NODES)
    assert abs(found.seconds - (MOST_NODES + 5)) < 4
