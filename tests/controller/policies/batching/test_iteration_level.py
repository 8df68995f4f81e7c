from controller.policies.batching.iteration_level import IterationLevel
from tests.controller.policies.batching.view import FakeView, decoding, granted, queued, running


def test_prompts_run_whole_beside_decodes():
    view = FakeView([decoding("d")], [queued("a", 8), queued("b", 8)])
    assert granted(IterationLevel(), view) == [("d", 1), ("a", 8), ("b", 8)]


def test_the_budget_bounds_prompts_in_a_step():
    view = FakeView([decoding("d")], [queued("a", 15), queued("b", 8)])
    assert granted(IterationLevel(), view) == [("d", 1), ("a", 15)]


def test_a_prompt_beyond_the_budget_runs_with_decodes_only():
    view = FakeView([decoding("d")], [queued("big", 90), queued("b", 1)])
    assert granted(IterationLevel(), view) == [("d", 1), ("big", 90)]


def test_a_recomputed_sequence_runs_whole_too():
    view = FakeView([running("again", 0, prompt=10, output=7)], [])
    assert granted(IterationLevel(), view) == [("again", 17)]


def test_slots_bound_admission():
    view = FakeView([decoding("d")], [queued("a", 1), queued("b", 1)], max_num_seqs=2)
    assert granted(IterationLevel(), view) == [("d", 1), ("a", 1)]
