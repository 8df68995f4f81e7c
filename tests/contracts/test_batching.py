"""What every registered batching policy promises, on any engine it may be shown."""

import copy
from dataclasses import is_dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.policies.batching import BATCHINGS
from tests.controller.policies.batching.view import FakeView, decoding, queued, running

ALL = pytest.mark.parametrize("name", list(BATCHINGS))
engines = st.builds(
    lambda decodes, begun, queue, cached, room, budget: FakeView(
        [decoding(f"d{n}") for n in range(decodes)] + [running(f"p{n}", done) for n, done in enumerate(begun)],
        [queued(f"q{n}", prompt) for n, prompt in enumerate(queue)],
        token_budget=decodes + len(begun) + budget,
        max_num_seqs=decodes + len(begun) + room,
        cached={"q0": cached},
    ),
    decodes=st.integers(0, 5),
    begun=st.lists(st.integers(0, 9), max_size=3),
    queue=st.lists(st.integers(5, 40), max_size=5),
    cached=st.integers(0, 4),
    room=st.integers(0, 4),
    budget=st.integers(1, 30),
)


@ALL
def test_it_has_its_name_and_a_frozen_config(name):
    policy = BATCHINGS[name]()
    assert policy.name == name
    assert is_dataclass(policy.Config)
    assert policy.Config.__dataclass_params__.frozen


@ALL
@settings(deadline=None, max_examples=60)
@given(view=engines)
def test_composing_changes_nothing_and_repeats_itself(name, view):
    policy = BATCHINGS[name]()
    before = [copy.copy(seq) for seq in [*view.running, *view.queue]]
    first = policy.compose(view, 0.0)
    assert first == policy.compose(view, 0.0)
    for seq, kept in zip([*view.running, *view.queue], before, strict=True):
        assert (seq.computed, seq.output_tokens, seq.state) == (kept.computed, kept.output_tokens, kept.state)


@ALL
@settings(deadline=None, max_examples=60)
@given(view=engines)
def test_grants_are_possible(name, view):
    """Nobody twice, never more than there is to compute, no more sequences than slots."""
    grants = BATCHINGS[name]().compose(view, 0.0)
    assert len({grant.seq.id for grant in grants}) == len(grants)
    for seq, tokens in grants:
        assert 1 <= tokens <= (seq.remaining if seq in view.running else view.uncached(seq))
    assert len({grant.seq.id for grant in grants} | {seq.id for seq in view.running}) <= view.max_num_seqs


@ALL
@settings(deadline=None, max_examples=60)
@given(view=engines)
def test_no_request_overtakes_in_the_queue_and_work_is_never_refused(name, view):
    grants = BATCHINGS[name]().compose(view, 0.0)
    admitted = [grant.seq for grant in grants if grant.seq in view.queue]
    if not getattr(BATCHINGS[name], "reorders", False):
        assert admitted == view.queue[: len(admitted)]
    assert grants or not (view.running or (view.queue and view.max_num_seqs))


@pytest.mark.parametrize("name", ["chunked_prefill", "iteration_level"])
@settings(deadline=None, max_examples=60)
@given(view=engines)
def test_decodes_always_run(name, view):
    """Stall-free: a running sequence that only needs its next token gets it in every step (not vLLM's own promise)."""
    granted = {grant.seq.id for grant in BATCHINGS[name]().compose(view, 0.0)}
    assert {seq.id for seq in view.running if seq.decoding} <= granted
