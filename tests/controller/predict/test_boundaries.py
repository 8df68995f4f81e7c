"""Boundaries inside a step against F5, and the composed operators."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.errors import ConfigError, UnknownName
from controller.core.steps import Chunk, Seq, Step
from controller.core.types import LatencyCoefficients
from controller.predict.boundaries import SHAPES, ComposedBoundaries, LayerProfile, shape

F5 = LayerProfile(1, (2.0, 8.0, 1.0, 4.0, 3.0))  # ms: qkv, attention, o, gate_up, down
A100 = LatencyCoefficients(6.63e-3, 5.54e-5, 1.52e-9, 1.15e-2, 8.2e-8, 3.66e-5)


def test_f5_a_signal_in_mid_layer():
    assert F5.next_boundary("operator", 18.0, 5.0) - 5.0 == pytest.approx(5.0)
    assert F5.next_boundary("layer", 18.0, 5.0) - 5.0 == pytest.approx(13.0)
    assert F5.next_boundary("chunk", 18.0, 5.0) == 18.0
    assert F5.next_boundary("none", 18.0, 5.0) == 18.0


def test_f5_a_signal_at_a_random_moment():
    assert F5.mean_wait("operator", 18.0) == pytest.approx(2.6111, abs=5e-5)
    assert F5.mean_wait("layer", 18.0) == pytest.approx(9.0)
    assert F5.mean_wait("layer", 18.0) / F5.mean_wait("operator", 18.0) == pytest.approx(3.4468, abs=5e-5)
    moments = [18.0 * (i + 0.5) / 20_000 for i in range(20_000)]
    waits = [F5.next_boundary("operator", 18.0, at) - at for at in moments]
    assert sum(waits) / len(waits) == pytest.approx(2.6111, abs=1e-3)


@settings(deadline=None, max_examples=200)
@given(
    layers=st.integers(1, 90),
    durations=st.lists(st.floats(0.0, 9.0), min_size=1, max_size=6).filter(lambda d: sum(d) > 0.1),
    share=st.floats(0.0, 0.999),
)
def test_boundaries_are_ahead_and_operators_end_no_later_than_layers(layers, durations, share):
    profile = LayerProfile(layers, tuple(durations))
    operator = profile.next_boundary("operator", 2.0, 2.0 * share)
    layer = profile.next_boundary("layer", 2.0, 2.0 * share)
    assert 2.0 * share < operator <= layer + 1e-9
    assert layer <= 2.0
    assert layer - 2.0 * share <= 2.0 / layers + 1e-9


def test_a_resumed_step_goes_on_to_the_next_boundary():
    """A step stands exactly at a boundary when it was suspended there."""
    stop, stops = 0.0, []
    for _ in range(10):
        stop = LayerProfile(2, (2.0, 8.0, 1.0, 4.0, 3.0)).next_boundary("operator", 36.0, stop)
        stops.append(stop)
    assert stops == pytest.approx([2, 10, 11, 15, 18, 20, 28, 29, 33, 36])


def test_projections_as_measured_for_llama_70b():
    """vidur's measured kernels at TP 2, 4,096 tokens: 1.4125, 1.2782, 7.9768, 4.0220 ms."""
    measured = (1.4125, 1.2782, 7.9768, 4.0220)
    for ours, theirs in zip(SHAPES["llama3-70b"].projection_shares(), measured, strict=True):
        assert ours == pytest.approx(theirs / sum(measured), abs=0.01)


def test_attention_takes_the_quadratic_part_of_the_step():
    boundaries = ComposedBoundaries("operator", shape("llama3-8b"), A100)
    profile = boundaries.profile(8192, 8192**2)
    assert profile.durations[1] / sum(profile.durations) == pytest.approx(
        A100.prefill_c * 8192**2 / (A100.prefill_a + A100.prefill_b * 8192 + A100.prefill_c * 8192**2)
    )
    seq = Seq("a", 0.0, 8192, 1)
    step = Step(1, (Chunk(seq, 0, 8192, True),), (), 0)
    qkv = boundaries.next_boundary(step, 0.32, 0.0)
    assert qkv == pytest.approx(0.01 * profile.durations[0] / sum(profile.durations))


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_shares_add_up(name):
    assert sum(shape(name).projection_shares()) == pytest.approx(1.0)


def test_bad_settings_are_refused():
    with pytest.raises(UnknownName):
        shape("gpt-5")
    for make, field in (
        (lambda: LayerProfile(0, (1.0,)), "layers"),
        (lambda: LayerProfile(1, ()), "durations"),
        (lambda: ComposedBoundaries("kernel", shape("llama3-8b"), A100), "boundary"),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert caught.value.field == field
