import pytest

from controller.core.errors import ConfigError
from controller.policies.batching.chunked_prefill import ChunkedPrefill, ChunkedPrefillConfig
from tests.controller.policies.batching.view import FakeView, decoding, granted, queued, running


def test_decodes_first_then_begun_prefills_then_new_ones():
    view = FakeView([running("begun", 4), decoding("d1"), decoding("d2")], [queued("new", 50)])
    assert granted(ChunkedPrefill(), view) == [("d1", 1), ("d2", 1), ("begun", 6), ("new", 12)]


def test_the_budget_is_never_exceeded():
    view = FakeView([decoding(str(n)) for n in range(4)], [queued("new", 50)], token_budget=4)
    assert granted(ChunkedPrefill(), view) == [(str(n), 1) for n in range(4)]


def test_slots_bound_admission():
    view = FakeView([decoding("d")], [queued("a", 3), queued("b", 3)], max_num_seqs=2)
    assert granted(ChunkedPrefill(), view) == [("d", 1), ("a", 3)]


def test_a_cached_prefix_costs_no_budget():
    view = FakeView([], [queued("a", 50), queued("b", 10)], cached={"a": 48})
    assert granted(ChunkedPrefill(), view) == [("a", 2), ("b", 10)]


def test_the_threshold_leaves_budget_to_those_behind():
    policy = ChunkedPrefill(ChunkedPrefillConfig(long_prefill_tokens=6))
    view = FakeView([], [queued("long", 50), queued("short", 5), queued("next", 50)])
    assert granted(policy, view) == [("long", 6), ("short", 5), ("next", 6)]


def test_a_threshold_below_one_is_refused():
    with pytest.raises(ConfigError) as caught:
        ChunkedPrefillConfig(long_prefill_tokens=0)
    assert caught.value.field == "long_prefill_tokens"
