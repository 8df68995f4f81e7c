"""The engine scheduler: order, chunks, preemption, aborts, sleep."""

import pytest

from controller.core.errors import ConfigError
from controller.core.steps import Aborted, CacheReset, FinishReason, Paused, Resumed, SeqState, StepDone
from controller.engine import EngineConfig, ProtocolError
from controller.policies.batching import BATCHINGS
from tests.controller.engine.driver import Driver, expected_output, make_seq, names, order_of_first_tokens

BOTH = pytest.mark.parametrize("batching", list(BATCHINGS))


@BOTH
def test_one_sequence_gets_its_tokens_and_ends(batching):
    driver = Driver(batching)
    seq = make_seq("a", 8, max_tokens=3)
    driver.add(seq)
    driver.run()
    assert driver.outputs["a"] == expected_output(seq)
    assert driver.ended == {"a": FinishReason.LENGTH}
    assert (seq.scheduled_at, seq.first_token_at, seq.last_token_at) == (0.0, 1.0, 3.0)
    assert driver.scheduler.blocks.free == 64


@BOTH
def test_sequences_join_and_leave_between_steps(batching):
    driver = Driver(batching)
    driver.add(make_seq("long", 8, max_tokens=6))
    driver.finish_step()
    driver.add(make_seq("short", 8, max_tokens=1, arrival=1.0))
    driver.finish_step()
    assert names([chunk.seq for chunk in driver.step.chunks]) == ["short"]
    assert names(driver.step.decodes) == ["long"]
    driver.run()
    assert list(driver.ended) == ["short", "long"]


def test_end_of_sequence_stops_but_not_before_min_tokens():
    driver = Driver()
    driver.eos_at = lambda seq: 1
    driver.add(make_seq("a", max_tokens=5), make_seq("b", max_tokens=5, min_tokens=2, arrival=1.0))
    driver.run()
    assert driver.ended == {"a": FinishReason.STOP, "b": FinishReason.LENGTH}
    assert len(driver.outputs["a"]) == 2


def test_ignore_eos_runs_to_the_bound():
    driver = Driver()
    driver.eos_at = lambda seq: 1
    driver.add(make_seq("a", max_tokens=5, ignore_eos=True))
    driver.run()
    assert len(driver.outputs["a"]) == 5


def test_a_stop_token_ends_a_sequence_and_says_so():
    """Whether it ignores the model's own end or not, and not before `min_tokens`; two sequences have their own each."""
    driver, told = Driver(), [make_seq(name) for name in "abcd"]
    said = {seq.id: expected_output(seq) for seq in told}
    plain = make_seq("a", max_tokens=4, stop_tokens=frozenset({said["a"][1], said["a"][2]}))
    ignoring = make_seq("b", max_tokens=4, stop_tokens=frozenset({said["b"][2]}), ignore_eos=True)
    longer = make_seq("c", max_tokens=4, stop_tokens=frozenset({said["c"][0], said["c"][2]}), min_tokens=1)
    other = make_seq("d", max_tokens=4, stop_tokens=frozenset({1000}))
    driver.add(plain, ignoring, longer, other)
    driver.run()
    assert [len(driver.outputs[name]) for name in "abcd"] == [2, 3, 3, 4]
    assert [driver.ended[name] for name in "abcd"] == [FinishReason.STOP] * 3 + [FinishReason.LENGTH]
    assert [seq.stopped_by for seq in (plain, ignoring, longer)] == [said["a"][1], said["b"][2], said["c"][2]]
    assert other.stopped_by is None


def test_the_models_own_end_is_no_stop_token_of_the_request_unless_it_is_ignored():
    for ignore in (False, True):
        driver, seq = Driver(), make_seq("a", max_tokens=4, ignore_eos=ignore)
        driver.eos_at = lambda seq: 1
        seq.stop_tokens = frozenset({expected_output(seq)[1]})
        driver.add(seq)
        driver.run()
        assert (driver.ended, len(driver.outputs["a"])) == ({"a": FinishReason.STOP}, 2)
        assert (seq.stopped_by is not None) is ignore


def test_the_context_bounds_the_output():
    driver = Driver(max_model_len=12)
    driver.add(make_seq("a", 8, max_tokens=100))
    driver.run()
    assert len(driver.outputs["a"]) == 4
    assert driver.ended["a"] is FinishReason.LENGTH


def test_lower_priority_values_go_first_ties_by_arrival_then_id():
    driver = Driver(max_num_seqs=1, max_num_batched_tokens=8)
    driver.add(make_seq("running", max_tokens=1))
    driver.add(
        make_seq("late-urgent", priority=-1, arrival=9.0, max_tokens=1),
        make_seq("b", priority=2, arrival=5.0, max_tokens=1),
        make_seq("a", priority=2, arrival=5.0, max_tokens=1),
        make_seq("early-lazy", priority=7, arrival=1.0, max_tokens=1),
    )
    driver.run()
    assert order_of_first_tokens(driver) == ["running", "late-urgent", "a", "b", "early-lazy"]


def test_fcfs_ignores_priorities():
    driver = Driver(max_num_seqs=1, max_num_batched_tokens=8, scheduling_policy="fcfs")
    driver.add(*(make_seq(str(n), priority=-n, arrival=float(n), max_tokens=1) for n in range(4)))
    driver.run()
    assert order_of_first_tokens(driver) == ["0", "1", "2", "3"]


def test_who_holds_blocks_goes_on_when_no_one_queued_finds_any():
    """A policy of its own order may want only a queued sequence that does not fit: the engine must not stand still."""
    driver = Driver("slo_aware_batching", kv_blocks=8, max_model_len=32, max_num_batched_tokens=8)
    begun, urgent = make_seq("begun", 24, max_tokens=2, due=50.0), make_seq("urgent", 20, max_tokens=2, due=5.0)
    driver.add(begun)
    driver.finish_step()
    driver.finish_step()
    driver.add(urgent)
    driver.run()
    assert set(driver.ended) == {"begun", "urgent"}
    assert order_of_first_tokens(driver) == ["begun", "urgent"]


def test_a_waiting_urgent_sequence_does_not_evict_running_ones():
    driver = Driver(max_num_seqs=1, max_num_batched_tokens=8)
    driver.add(make_seq("lazy", priority=9, max_tokens=4))
    driver.add(make_seq("urgent", priority=0, arrival=1.0))
    driver.run()
    assert driver.scheduler.totals.preemptions == 0
    assert list(driver.ended) == ["lazy", "urgent"]


def test_long_prompts_are_cut_to_the_token_budget_and_decodes_never_wait():
    driver = Driver(max_num_batched_tokens=10, max_num_seqs=4)
    driver.add(make_seq("decoding", 4, max_tokens=6))
    driver.finish_step()
    driver.add(make_seq("prompt", 25, max_tokens=1, arrival=1.0))
    driver.run()
    lengths = [
        (chunk.start, chunk.length) for step in driver.steps for chunk in step.chunks if chunk.seq.id == "prompt"
    ]
    assert lengths == [(0, 9), (9, 9), (18, 7)]
    assert all(step.tokens <= 10 for step in driver.steps)
    assert all("decoding" in names(step.decodes) for step in driver.steps[1:6])


def test_whole_prompts_share_a_step_only_within_the_budget():
    driver = Driver("iteration_level", max_num_batched_tokens=10)
    driver.add(*(make_seq(name, 6, max_tokens=1, arrival=n) for n, name in enumerate("abc")))
    driver.run()
    assert [[chunk.length for chunk in step.chunks] for step in driver.steps] == [[6], [6], [6]]


def test_a_prompt_beyond_the_budget_runs_whole_with_no_prompt_beside_it():
    driver = Driver("iteration_level", max_num_batched_tokens=10)
    driver.add(make_seq("big", 40, max_tokens=1), make_seq("small", 2, max_tokens=1, arrival=1.0))
    driver.run()
    assert [[chunk.length for chunk in step.chunks] for step in driver.steps] == [[40], [2]]


def test_max_num_seqs_bounds_what_runs():
    driver = Driver(max_num_seqs=2)
    driver.add(*(make_seq(str(n), arrival=float(n)) for n in range(5)))
    assert len(driver.scheduler.running) == 2
    assert driver.scheduler.waiting_count == 3
    driver.run()
    assert len(driver.ended) == 5


def test_the_queue_bound_rejects_and_counts():
    driver = Driver(max_num_seqs=1, max_num_batched_tokens=8, max_waiting=1)
    for arrival, name in enumerate(["0", "1", "late"]):
        driver.add(make_seq(name, arrival=float(arrival)))
    assert driver.rejected == {"late": "queue_full"}
    assert driver.scheduler.totals.rejected == 1
    driver.run()
    assert set(driver.ended) == {"0", "1"}


def test_a_bound_of_zero_still_serves_an_idle_engine():
    driver = Driver(max_waiting=0)
    driver.add(make_seq("a"))
    driver.run()
    assert driver.ended == {"a": FinishReason.LENGTH}


def test_a_prompt_beyond_the_context_is_rejected():
    driver = Driver(max_model_len=16)
    driver.add(make_seq("a", 16))
    assert driver.rejected == {"a": "too_long"}


@BOTH
def test_preemption_takes_the_least_urgent_and_keeps_its_output(batching):
    driver = Driver(batching, kv_blocks=8, max_model_len=32, max_num_batched_tokens=32)
    seqs = [
        make_seq("lazy", list(range(8)), max_tokens=12, priority=5, arrival=0.0),
        make_seq("urgent", list(range(50, 58)), max_tokens=12, priority=0, arrival=1.0),
    ]
    driver.add(*seqs)
    driver.run()
    assert seqs[0].preemptions > 0
    assert seqs[1].preemptions == 0
    assert list(driver.ended) == ["urgent", "lazy"]
    assert all(driver.outputs[seq.id] == expected_output(seq) for seq in seqs)


def test_fcfs_preempts_the_latest_arrival():
    driver = Driver(kv_blocks=8, max_model_len=32, max_num_batched_tokens=32, scheduling_policy="fcfs")
    early, late = make_seq("early", 8, 12, priority=9), make_seq("late", 8, 12, priority=0, arrival=1.0)
    driver.add(early, late)
    driver.run()
    assert (early.preemptions, late.preemptions > 0) == (0, True)


def test_a_recomputed_sequence_gets_its_own_prefix_back_from_the_cache():
    driver = Driver(kv_blocks=8, max_model_len=32, max_num_batched_tokens=32)
    lazy = make_seq("lazy", list(range(8)), max_tokens=12, priority=5)
    driver.add(lazy, make_seq("urgent", list(range(50, 58)), max_tokens=12, arrival=1.0))
    driver.run()
    assert lazy.preemptions > 0
    assert lazy.cached > 0


def test_a_cached_prefix_costs_no_budget():
    driver = Driver(max_num_batched_tokens=16)
    driver.add(make_seq("first", list(range(16)), max_tokens=1))
    driver.run()
    driver.add(make_seq("second", [*range(16), 99], max_tokens=1, arrival=9.0))
    chunk = driver.step.chunks[0]
    assert (chunk.start, chunk.length, chunk.last) == (16, 1, True)
    totals = driver.scheduler.totals
    assert (totals.prompt, totals.prompt_cached, totals.prefix_queries, totals.prefix_hits) == (33, 16, 33, 16)


def test_a_follow_up_reuses_the_blocks_of_the_answer():
    driver = Driver()
    first = make_seq("first", list(range(8)), max_tokens=8)
    driver.add(first)
    driver.run()
    driver.add(make_seq("second", [*first.token_ids, 7, 7], max_tokens=1, arrival=20.0))
    assert driver.step.chunks[0].start == 12  # 15 of 16 tokens were computed: three full blocks


@pytest.mark.parametrize("when", ["waiting", "in_step", "between_steps"])
def test_abort_at_any_time_frees_everything_once(when):
    driver = Driver(max_num_seqs=1, max_num_batched_tokens=8)
    seq = make_seq("victim", 20, max_tokens=9, arrival=1.0)
    if when == "waiting":
        driver.add(make_seq("other", max_tokens=2), seq)
    else:
        driver.add(seq)
    if when == "between_steps":
        driver.send(Paused())
        driver.finish_step()
    driver.send(Aborted(seq))
    driver.send(Aborted(seq), Resumed())
    assert driver.ended["victim"] is FinishReason.ABORT
    driver.run()
    assert "victim" not in driver.outputs
    assert driver.scheduler.idle
    assert driver.scheduler.blocks.free == 64


def test_blocks_of_an_aborted_sequence_are_not_reused_while_its_step_runs():
    driver = Driver(kv_blocks=16)
    seq = make_seq("victim", 20)
    driver.add(seq)
    driver.send(Aborted(seq))
    assert driver.scheduler.blocks.free == 16 - 5
    driver.finish_step()
    assert driver.scheduler.blocks.free == 16


def test_a_stop_string_ends_with_stop():
    driver = Driver()
    seq = make_seq("a", max_tokens=9)
    driver.add(seq)
    driver.finish_step()
    driver.send(Aborted(seq, FinishReason.STOP))
    driver.run()
    assert driver.ended == {"a": FinishReason.STOP}
    assert len(driver.outputs["a"]) == 1


def test_pause_freezes_and_resume_goes_on():
    driver = Driver()
    seq = make_seq("a", max_tokens=4)
    driver.add(seq)
    driver.send(Paused())
    driver.finish_step()
    assert driver.step is None
    driver.add(make_seq("b", arrival=1.0))
    assert driver.step is None
    driver.send(Resumed())
    driver.run()
    assert set(driver.ended) == {"a", "b"}
    assert seq.preemptions == 0


@pytest.mark.parametrize("in_step", [True, False])
def test_sleeping_gives_back_all_kv_and_output_survives(in_step):
    driver = Driver()
    seq = make_seq("a", list(range(9)), max_tokens=6)
    driver.add(seq)
    driver.finish_step()
    if in_step:
        driver.send(Paused(release_kv=True))
        driver.finish_step()
    else:
        driver.send(Paused())
        driver.finish_step()
        driver.send(Paused(release_kv=True))
    assert driver.scheduler.blocks.free == 64
    assert seq.state is SeqState.WAITING
    assert driver.scheduler.uncached(seq) == seq.tokens
    driver.send(Resumed())
    driver.run()
    assert driver.outputs["a"] == expected_output(seq)


def test_cache_reset_forgets_prefixes():
    driver = Driver()
    driver.add(make_seq("a", list(range(9)), max_tokens=1))
    driver.run()
    driver.send(CacheReset())
    assert driver.scheduler.uncached(make_seq("b", list(range(9)))) == 9


def test_a_doubled_id_and_a_stale_result_are_errors():
    driver = Driver()
    driver.add(make_seq("a"))
    with pytest.raises(ProtocolError, match="'a' is in use"):
        driver.add(make_seq("a"))
    with pytest.raises(ProtocolError, match="step 99"):
        driver.send(StepDone(99, [], 1.0))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_blocks", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 4),
        ("max_model_len", 1000),
        ("scheduling_policy", "lifo"),
        ("max_waiting", -1),
    ],
)
def test_config_names_the_wrong_field(field, value):
    good = {"kv_blocks": 8, "block_size": 16, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128}
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{**good, field: value})
    assert caught.value.field == field
