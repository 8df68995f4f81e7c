"""vLLM's own scheduler: one budget, order of admission, and a step composed while the one before it runs."""

import pytest

from controller.core.errors import ConfigError
from controller.core.steps import Chunk, Seq, SeqState, Step, StepRan
from controller.core.types import LatencyCoefficients, Targets
from controller.dispatch import build_dispatcher
from controller.policies.batching.vllm_v1 import VllmV1, VllmV1Config
from controller.simulator.settings import InstanceSettings, SimulationSettings
from controller.simulator.simulation import Simulation
from controller.simulator.workloads.demand import Demand
from tests.controller.policies.batching.view import FakeView, decoding, granted, queued, running

AHEAD = VllmV1Config(async_scheduling=True)


def test_running_first_then_queued_ones_in_one_budget():
    view = FakeView([decoding("d"), running("p", 4)], [queued("q", 30)], token_budget=20)
    assert granted(VllmV1(), view) == [("d", 1), ("p", 6), ("q", 13)]


def test_a_long_prefill_is_capped_only_while_others_are_there():
    policy = VllmV1(VllmV1Config(long_prefill_tokens=5))
    assert granted(policy, FakeView([], [queued("q", 30)])) == [("q", 20)]
    assert granted(policy, FakeView([decoding("d")], [queued("q", 30)])) == [("d", 1), ("q", 5)]
    with pytest.raises(ConfigError):
        VllmV1Config(long_prefill_tokens=0)


def ran(policy, seqs, seconds, now, repeats=1):
    policy.observe(StepRan(Step(1, (), tuple(seqs), 0), repeats, seconds), now)


def test_a_step_composed_ahead_does_not_know_who_came_meanwhile():
    policy, view = VllmV1(AHEAD), FakeView([decoding("d")], [queued("early", 5), queued("late", 5)])
    view.queue[0].arrival, view.queue[1].arrival = 0.9, 1.05
    ran(policy, view.running, 0.1, 1.1)
    assert [(seq.id, n) for seq, n in policy.compose(view, 1.1)] == [("d", 1), ("early", 5)]
    assert [(seq.id, n) for seq, n in policy.compose(view, 1.2)] == [("d", 1), ("early", 5), ("late", 5)]


def test_of_a_leap_only_the_last_step_counts():
    policy, view = VllmV1(AHEAD), FakeView([decoding("d")], [queued("q", 5)])
    view.queue[0].arrival = 0.95
    ran(policy, view.running, 1.0, 1.1, repeats=10)
    assert len(policy.compose(view, 1.1)) == 2


def test_the_slot_of_a_sequence_that_just_ended_is_not_free_yet():
    policy, view = VllmV1(AHEAD), FakeView([decoding("d")], [queued("q", 5)], max_num_seqs=2)
    ended = decoding("e")
    ended.state = SeqState.FINISHED
    ran(policy, [*view.running, ended], 0.1, 1.1)
    assert [seq.id for seq, _ in policy.compose(view, 1.1)] == ["d"]
    ran(policy, view.running, 0.1, 1.2)
    assert [seq.id for seq, _ in policy.compose(view, 1.2)] == ["d", "q"]


def test_an_engine_with_nothing_running_composes_at_once():
    policy, view = VllmV1(AHEAD), FakeView([], [queued("q", 5)])
    view.queue[0].arrival = 1.05
    done = Seq("e", 0.0, 5, 1, state=SeqState.FINISHED)
    policy.observe(StepRan(Step(1, (Chunk(done, 0, 5, True),), (), 0), 1, 0.1), 1.1)
    assert [seq.id for seq, _ in policy.compose(view, 1.1)] == ["q"]


def ttft(settings, second_at):
    """Of a short prompt that arrives while another request decodes; steps of 0.1 s and more."""
    engine = InstanceSettings(
        LatencyCoefficients(0.1, 0.0, 0.0, 0.1, 0.0, 0.0), batching="vllm_v1", batching_settings=settings
    )
    targets = Targets(10, 1, None, 1e9)
    demands = [Demand("a", 0.0, 10, 20, targets), Demand("b", second_at, 10, 5, targets)]
    result = Simulation(SimulationSettings((engine,)), build_dispatcher("round_robin"), demands).run()
    return {record.id: record for record in result.records}["b"].ttft_s


def test_a_request_waits_for_one_more_step():
    assert ttft({}, 0.45) == pytest.approx(0.05 + 0.1)
    assert ttft({"async_scheduling": True}, 0.45) == pytest.approx(0.05 + 0.1 + 0.1)
    assert ttft({"async_scheduling": True}, 5.0) == pytest.approx(0.1)


def test_only_without_it_are_steps_steady():
    assert VllmV1().steady
    assert not VllmV1(AHEAD).steady
