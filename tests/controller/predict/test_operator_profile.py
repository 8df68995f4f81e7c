"""Measured operators: reading, interpolation, and the boundaries that follow from them."""

import json
from pathlib import Path

import pytest

from controller.core.errors import ConfigError
from controller.core.steps import Chunk, Seq, Step
from controller.core.types import LatencyCoefficients
from controller.predict.boundaries import ComposedBoundaries, ProfiledBoundaries, shape
from controller.predict.operator_profile import OPERATORS, Curve, read_operator_profile

SAMPLE = Path(__file__).parents[3] / "controller/simulator/samples/operators_thin_cpu.json"
F5 = dict(zip(OPERATORS, (2e-3, 8e-3, 1e-3, 4e-3, 3e-3), strict=True))


def rows(*sizes, past=0, **changed):
    return [{"tokens": tokens, "past": past, **F5, **changed} for tokens in sizes]


def read(raw, layers=2):
    return read_operator_profile(raw, layers)


def step(tokens, start=0):
    return Step(1, (Chunk(Seq("a", 0.0, start + tokens, 1), start, tokens, True),), (), 0)


def test_f5_from_measured_operators():
    """The same numbers whatever the whole-step profile says: 5 ms into a layer of 18 ms, and at a random moment."""
    profile = read({"layers": 1, "rows": rows(512)})
    operator, layer = (ProfiledBoundaries(kind, profile) for kind in ("operator", "layer"))
    assert operator.next_boundary(step(512), 0.018, 0.005) - 0.005 == pytest.approx(0.005)
    assert layer.next_boundary(step(512), 0.018, 0.005) - 0.005 == pytest.approx(0.013)
    waits = operator.profile(512, 512**2)
    assert waits.mean_wait("operator", 18.0) == pytest.approx(2.6111, abs=5e-5)
    assert waits.mean_wait("layer", 18.0) == pytest.approx(9.0)


def test_a_step_takes_as_long_as_its_latency_profile_says():
    """Only where in it operators end is measured: at half the speed every boundary comes at twice the time."""
    boundaries = ProfiledBoundaries("operator", read({"rows": rows(512)}))
    once, twice = (boundaries.next_boundary(step(512), seconds, 0.0) for seconds in (0.036, 0.072))
    assert (once, twice) == (pytest.approx(0.002), pytest.approx(0.004))


def test_projections_are_interpolated_by_tokens_and_attention_by_squares():
    first = dict.fromkeys(OPERATORS, 1e-3)
    second = dict(zip(OPERATORS, (3e-3, 9e-3, 2e-3, 5e-3, 1e-3), strict=True))
    profile = read({"rows": [{"tokens": 100, **first}, {"tokens": 300, **second}]})
    middle = profile.durations(200, 50_000)  # squares from 10,000 to 90,000
    assert middle == pytest.approx((2e-3, 5e-3, 1.5e-3, 3e-3, 1e-3))
    assert profile.durations(300, 300 * (300 + 0)) == pytest.approx(tuple(second.values()))
    assert profile.durations(400, 170_000) == pytest.approx((4e-3, 17e-3, 2.5e-3, 7e-3, 1e-3))


def test_a_cached_prefix_makes_attention_longer_and_nothing_else():
    longer = {**F5, "attn": 24e-3}
    profile = read({"rows": [*rows(100), {"tokens": 100, "past": 100, **longer}]})
    alone, behind = profile.durations(100, 100 * 100), profile.durations(100, 100 * 300)
    assert behind == pytest.approx(tuple(longer.values()))
    assert [x for name, x in zip(OPERATORS, alone, strict=True) if name != "attn"] == pytest.approx(
        [x for name, x in zip(OPERATORS, behind, strict=True) if name != "attn"]
    )


def test_squares_say_what_was_measured_behind_a_cached_past():
    """Of the measured sample: chunks of 512 tokens behind up to 1,536, told from prompts that were prefilled whole."""
    raw = json.loads(SAMPLE.read_text())
    whole = read({**raw, "rows": [row for row in raw["rows"] if not row["past"]]})
    chunks = [row for row in raw["rows"] if row["past"]]
    assert len(chunks) == 3
    for row in chunks:
        squares = row["tokens"] * (row["tokens"] + 2 * row["past"])
        found = whole.durations(row["tokens"], squares)[OPERATORS.index("attn")]
        assert found == pytest.approx(row["attn"], rel=0.05)


def test_curves_hold_below_go_on_above_and_average_what_was_measured_twice():
    curve = Curve.through([(10.0, 1.0), (20.0, 3.0), (10.0, 2.0), (30.0, 2.5)])
    assert [curve.at(size) for size in (1, 10, 15, 20, 25, 30)] == pytest.approx([1.5, 1.5, 2.25, 3.0, 2.75, 2.5])
    assert curve.at(1000) == 2.5  # a last line that falls is not followed below what was measured
    alone = Curve.through([(10.0, 1.0)])
    assert [alone.at(size) for size in (5, 10, 40)] == [1.0, 1.0, 4.0]


def test_layers_are_the_files_own_or_those_of_the_shape():
    assert read({"rows": rows(1)}, layers=32).layers == 32
    assert read({"rows": rows(1), "layers": 6}, layers=32).layers == 6


def test_text_of_a_csv_file_is_read_as_numbers():
    (row,) = rows(512)
    assert read({"rows": [{name: str(value) for name, value in row.items()}]}) == read({"rows": [row]})


def test_profiled_and_composed_are_told_apart_by_where_they_stop():
    clock = LatencyCoefficients(6.63e-3, 5.54e-5, 1.52e-9, 1.15e-2, 8.2e-8, 3.66e-5)
    composed = ComposedBoundaries("operator", shape("llama3-8b"), clock)
    profiled = ProfiledBoundaries("operator", read({"rows": rows(8192)}, 32))
    ends = [each.next_boundary(step(8192), 0.56, 0.0) for each in (composed, profiled)]
    assert ends[1] == pytest.approx(0.56 / 32 * 2 / 18)
    assert ends[0] != pytest.approx(ends[1], rel=0.1)


@pytest.mark.parametrize(
    ("raw", "field", "message"),
    [
        ([], "", "object or a path"),
        ({}, "rows", "not empty"),
        ({"rows": []}, "rows", "not empty"),
        ({"rows": rows(1), "speed": 2}, "speed", "valid: layers, machine"),
        ({"rows": rows(1), "layers": 0}, "layers", "at least 1"),
        ({"rows": rows(1), "layers": True}, "layers", "whole number"),
        ({"rows": [*rows(1), 7]}, "rows[1]", "object"),
        ({"rows": rows(0)}, "rows[0].tokens", "at least 1"),
        ({"rows": rows(5, past=-1)}, "rows[0].past", "at least 0"),
        ({"rows": rows(5, attn=-1e-3)}, "rows[0].attn", "at least 0"),
        ({"rows": rows(5, attn="fast")}, "rows[0].attn", "number"),
        ({"rows": rows(5, attn=float("inf"))}, "rows[0].attn", "number"),
        ({"rows": rows(5, norm=1e-3)}, "rows[0].norm", "valid: tokens, past, qkv_proj"),
        ({"rows": [{"tokens": 1, "attn": 1.0}]}, "rows[0].qkv_proj", "missing"),
        ({"rows": [{"tokens": 5, **dict.fromkeys(OPERATORS, 0.0)}]}, "rows", "take time"),
    ],
)
def test_what_is_wrong_is_named(raw, field, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(raw)
    assert caught.value.field == field


def test_an_unknown_boundary_is_refused():
    with pytest.raises(ConfigError) as caught:
        ProfiledBoundaries("kernel", read({"rows": rows(1)}))
    assert caught.value.field == "boundary"
