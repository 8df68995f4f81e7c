"""The made-up forest and graphs are published, so that gateways take them over."""

from __future__ import annotations

import pytest

from benchmarks.analyzer.in_force import put_forest_in_force, put_graphs_in_force
from controller.predict.answer_lengths import FEATURES
from controller.predict.length_forest import LengthForest
from controller.predict.pattern_graphs import Call, GraphSet, kind_of
from controller.selectors.records.graph_versions import published_graph_content, published_graphs
from controller.selectors.records.length_versions import published_content, published_versions

pytestmark = [pytest.mark.db, pytest.mark.django_db]


def test_both_are_published_and_graphs_match_the_calls_of_the_load():
    put_forest_in_force("demo")
    put_graphs_in_force("demo", "acme")
    (lengths,), (graphs,) = published_versions(), published_graphs()
    assert (lengths.subject, graphs.subject) == ("demo", "acme")
    assert LengthForest.from_bytes(published_content("demo", 1)).names == FEATURES
    found = GraphSet.from_bytes(published_graph_content("acme", 1))
    found.prepare()
    match = found.match([Call(kind_of("demo", ""), 100.0, None, 64, 0, 1)])
    assert match is not None
    assert match.candidates > 0
