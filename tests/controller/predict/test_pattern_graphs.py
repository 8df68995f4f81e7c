"""Pattern graphs: Fig. 4.2 and worked example C6, their file, and matching."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import numpy as np
import pytest

from controller.core.errors import ConfigError
from controller.predict.graph_medoids import decayed, medoids
from controller.predict.pattern_graphs import (
    MAGIC,
    MOST_NODES,
    Call,
    GraphSet,
    PatternGraph,
    graph_of,
    kind_of,
    levels_of,
    rests_of,
    set_of,
)
from controller.slo.stage_deadlines import accumulated_shares, stage_due

PLAN, SEARCH, WRITE = kind_of("big", "plan"), kind_of("small", "search"), kind_of("big", "write")


def workflow(scale: float = 1.0, *, searches: int = 3, output: int = 100) -> list[Call]:
    """A plan (2 s), searches side by side (3 s, after a second), and an answer (5 s): as in Fig. 4.2."""
    found = [Call(PLAN, 0.0, 2.0 * scale, 500, output)]
    begin = 3.0 * scale
    found += [Call(SEARCH, begin + 0.01 * n, begin + (3.0 - 0.1 * n) * scale, 200, 50) for n in range(searches)]
    return [*found, Call(WRITE, 6.0 * scale, 11.0 * scale, 900, 400)]


def chain(seconds: list[float], *, outputs: list[int] | None = None) -> list[Call]:
    ends = np.cumsum([0.0, *seconds]).tolist()
    given = outputs or [100] * len(seconds)
    return [Call(PLAN, began, ended, 500, out) for (began, ended), out in zip(pairwise(ends), given, strict=True)]


def one_set(*graphs: PatternGraph) -> GraphSet:
    return set_of(graphs, [1.0] * len(graphs), {})


def running(calls: list[Call], known: int) -> list[Call]:
    """The first `known` calls, and the next one as it begins."""
    return [*calls[:known], calls[known]._replace(ended=None, output_tokens=0)]


def test_a_call_depends_on_those_that_had_ended_when_it_began() -> None:
    assert levels_of(workflow()) == [0, 1, 1, 1, 2]
    overlapping = [Call(PLAN, 0, 10, 1, 1), Call(PLAN, 1, 2, 1, 1), Call(PLAN, 3, 4, 1, 1), Call(PLAN, 11, 12, 1, 1)]
    assert levels_of(overlapping) == [0, 0, 1, 2]


def test_parents_that_a_client_named_come_before_what_times_tell() -> None:
    def call(number: int, began: float, parents: tuple[int, ...] | None) -> Call:
        return Call(PLAN, began, began + 1, 1, 1, number, parents)

    plan = call(1, 0, None)
    assert levels_of([plan, call(2, 1, (1,)), call(3, 5, (1,)), call(4, 7, (2, 3))]) == [0, 1, 1, 2]
    assert levels_of([plan, call(2, 1, (1,)), call(3, 5, None)]) == [0, 1, 2]  # of one that tells nothing, times do
    assert levels_of([plan, call(2, 5, ())]) == [0, 0]
    assert levels_of([plan, call(3, 5, (2,))]) == [0, 1]  # its parent failed, or is not known


def test_observed_times_include_the_waiting_between_calls() -> None:
    levels = one_set(graph_of(workflow())).levels(0)
    assert [each.gap_s for each in levels] == pytest.approx([0, 1, 0], rel=0.04)
    assert [each.run_s for each in levels] == pytest.approx([2, 3, 5], rel=0.04)


def test_worked_example_c6_from_recorded_calls() -> None:
    graphs = one_set(graph_of(chain([2, 3, 5])))
    seconds = [level.gap_s + level.run_s for level in graphs.levels(0)]
    assert accumulated_shares(seconds) == pytest.approx([0.2, 0.5, 1.0], abs=0.02)
    for rule in ("accumulated", "own_share", "share_of_rest"):
        assert stage_due(rule, seconds, 0, 0.0, 0.0, 20.0) == pytest.approx(4, abs=0.3)
    # Stage 1 ends late, at 6: the share of the rest gives the second one until 11.25.
    match = graphs.match(running(chain([6, 3, 5]), 1))
    assert match is not None
    assert stage_due("share_of_rest", match.seconds, 0, 0.0, 6.0, 20.0) == pytest.approx(11.25, abs=0.2)
    assert decayed(10, 24) == pytest.approx(0.79766, abs=1e-5)


def test_the_pause_before_a_call_is_over_when_it_begins() -> None:
    match = one_set(graph_of(workflow())).match(running(workflow(), 1))
    assert match is not None
    assert match.seconds == pytest.approx([3, 5], rel=0.04)
    assert one_set(graph_of(workflow())).seconds_before(match) == pytest.approx([2, 1], rel=0.04)


def test_graphs_with_another_beginning_are_left_out() -> None:
    graphs = one_set(graph_of(workflow()), graph_of(chain([1, 1, 1, 1])))
    found = [graphs.match(running(workflow(), known)) for known in range(5)]
    assert [match and match.candidates for match in found] == [2, 1, 1, 1, 1]
    assert all(match is not None and match.graph == 0 for match in found[1:])
    assert graphs.match([Call(kind_of("other", ""), 0, None, 5, 0)]) is None
    assert graphs.match(running(chain([1, 1, 1, 1, 1]), 4)) is None  # longer than any such graph


def test_a_new_structure_is_compared_where_it_is_alike() -> None:
    graphs = one_set(graph_of(workflow()), graph_of(chain([1, 2, 3, 4])))
    match = graphs.match(running([*workflow(searches=5)], 6))
    assert match is not None
    assert (match.graph, match.candidates) == (0, 0)
    assert match.seconds == pytest.approx([5], rel=0.04)
    other = [Call(kind_of("other", ""), at, at + 0.5, 5, 5) for at in (0.0, 1.0)]
    mixed = graphs.match(running([*other, *chain([1, 2, 3])[2:]], 2))
    assert mixed is not None
    assert mixed.candidates == 0
    assert mixed.similarity < 0.5


def test_a_workflow_is_matched_anew_as_its_answers_come() -> None:
    """Short first answers went with short rests; the first call, alike in both, cannot tell."""
    short, long = chain([1, 1, 2], outputs=[20, 20, 20]), chain([1, 1, 40], outputs=[20, 700, 900])
    graphs = set_of([graph_of(short), graph_of(long)], [1.0, 2.0], {})
    first, second, third = (graphs.match(running(chain([1, 1, 9], outputs=[21, 650, 1]), known)) for known in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.graph == 1  # equally similar: the one that more workflows were like
    assert (third.graph, third.candidates) == (1, 2)
    back = graphs.match(running(chain([1, 1, 9], outputs=[21, 22, 1]), 2))
    assert back is not None
    assert back.graph == 0
    assert back.seconds == pytest.approx([2], rel=0.05)


def test_calls_beyond_those_that_are_stored_share_the_rest() -> None:
    calls = chain([1.0] * MOST_NODES + [4.0] * 5)
    graphs = one_set(graph_of(calls))
    assert graphs.graph_bytes <= 200
    match = graphs.match(running(calls, MOST_NODES + 2))
    assert match is not None
    assert match.seconds == pytest.approx([4, 4, 4])
    assert graphs.match(running([*calls, *(c._replace(began=c.began + 999) for c in calls)], MOST_NODES + 5)) is None


def test_the_file_is_read_again_as_it_was() -> None:
    graphs = set_of([graph_of(workflow()), graph_of(chain([1, 2]))], [3.0, 0.5], {"tenant": "acme"})
    again = GraphSet.from_bytes(graphs.to_bytes())
    assert again.to_bytes() == graphs.to_bytes()
    assert again.match(running(workflow(), 2)) == graphs.match(running(workflow(), 2))


def test_damaged_and_foreign_files_are_refused() -> None:
    graphs = one_set(graph_of(workflow()))
    content = graphs.to_bytes()
    damaged = content[:-10] + bytes([content[-10] ^ 1]) + content[-9:]
    for wrong in (b"", damaged, content[:-1], content.replace(MAGIC, b"slackline pattern graphs 9\n", 1)):
        with pytest.raises(ConfigError):
            GraphSet.from_bytes(wrong)
    for name, array in (
        ("offset", graphs.offset + 1),
        ("kind", graphs.kind + 7),
        ("run", np.zeros_like(graphs.run)),
        ("tail_s", np.full_like(graphs.tail_s, np.nan)),
        ("used", graphs.used[:0]),
        ("input", graphs.input.astype(np.int64)),
    ):
        whole = {each: getattr(graphs, each) for each in GraphSet.__dataclass_fields__} | {name: array}
        with pytest.raises(ConfigError):
            GraphSet.from_bytes(GraphSet(**whole).to_bytes())


def test_medoids_stand_for_groups_and_old_ones_go() -> None:
    rng = random.Random(3)
    many = [graph_of(workflow(output=rng.randint(95, 105))) for _ in range(30)]
    many += [graph_of(chain([1, 1], outputs=[rng.randint(9, 11), 5])) for _ in range(20)]
    old = [graph_of(workflow(searches=1))]
    found = medoids([*many, *old], [0.0] * 50 + [48.0], most=2)
    assert sorted(found.used.tolist()) == pytest.approx([20, 30], abs=0.01)
    assert found.to_bytes() == medoids([*many, *old], [0.0] * 50 + [48.0], most=2).to_bytes()
    asked = running(workflow(searches=1), 2)
    fresh, late = (medoids([*many, *old], [0.0] * 50 + [hours]).match(asked) for hours in (0.0, 48.0))
    assert fresh is not None
    assert late is not None
    assert (fresh.candidates, late.candidates) == (1, 0)
    with pytest.raises(ValueError, match="0 graphs"):
        medoids(many[:1], [1_000.0])


def test_500_graphs_are_matched_in_a_millisecond_of_processor_time() -> None:
    rng = random.Random(1)
    graphs = set_of(
        [graph_of(chain([rng.random() + 0.1 for _ in range(MOST_NODES)])) for _ in range(500)], [1.0] * 500, {}
    )
    graphs.prepare()
    calls = running(chain([1.0] * MOST_NODES), MOST_NODES - 1)
    times = []
    for _ in range(50):
        began = time.thread_time()
        assert graphs.match(calls) is not None
        times.append(time.thread_time() - began)
    assert np.median(times) < 2e-3  # bench-analyzer measures it; this finds a factor


def test_a_branch_beside_a_longer_call_is_not_told_that_it_has_no_time() -> None:
    """C, after A, runs for 50 s beside B. The graph has no time of C's level, so nothing is said of its share."""
    calls = [
        Call(PLAN, 0, 1, 10, 10),
        Call(SEARCH, 0.1, 100, 10, 10),
        Call(WRITE, 2, 52, 10, 10),
        Call(PLAN, 100.5, 110, 1, 1),
    ]
    assert levels_of(calls) == [0, 0, 1, 2]
    graphs = one_set(graph_of(calls))
    assert sum(each.gap_s + each.run_s for each in graphs.levels(0)) == pytest.approx(110.0, rel=0.05)
    assert graphs.match(running(calls, 2)) is None
    last = graphs.match(running(calls, 3))
    assert last is not None
    assert last.seconds == pytest.approx([9.5], rel=0.05)
    assert rests_of(calls)[1][0] == 0.0
    assert sum(rests_of(calls)[0]) == pytest.approx(110.0)


def test_levels_of_many_calls_are_those_of_comparing_each_with_all_before_it() -> None:
    rng = random.Random(3)
    for _ in range(50):
        begins = sorted(rng.uniform(0, 20) for _ in range(30))
        calls = [
            Call(PLAN, at, None if rng.random() < 0.1 else at + rng.choice([0.0, 1.0, 8.0]), 1, 1) for at in begins
        ]
        slow: list[int] = []
        for index, call in enumerate(calls):
            ended = [
                slow[n] for n, each in enumerate(calls[:index]) if each.ended is not None and each.ended <= call.began
            ]
            slow.append(max(ended) + 1 if ended else 0)
        assert levels_of(calls) == slow


def test_tokens_of_later_levels_are_within_their_steps() -> None:
    graphs = one_set(graph_of(workflow()))
    assert graphs.tokens_after(0, 0) == (pytest.approx(3 * 200 + 900, rel=0.04), pytest.approx(3 * 50 + 400, rel=0.04))
    assert graphs.tokens_after(0, 1) == (pytest.approx(900, rel=0.04), pytest.approx(400, rel=0.04))
    assert graphs.tokens_after(0, 2) == (0.0, 0.0)
