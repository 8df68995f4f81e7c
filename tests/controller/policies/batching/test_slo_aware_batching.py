"""FlowPrefill's batching against the worked examples F2 and F3."""

import pytest

from controller.core.errors import ConfigError
from controller.core.steps import Seq
from controller.core.types import LatencyCoefficients, Targets
from controller.policies.batching.slo_aware_batching import SloAwareBatching, SloAwareBatchingConfig, batch_with
from controller.simulator import Demand, InstanceSettings
from tests.controller.policies.batching.view import FakeView, decoding
from tests.controller.simulator.runs import simulate

CANDIDATES = [1000, 3000, 500, 1500]


def predict(tokens):
    return 0.01 + 1e-4 * tokens


@pytest.mark.parametrize(
    ("remaining", "budget", "head", "expected"),
    [
        (0.5, 4096, 1000, [0, 2, 3]),
        (0.4, 4096, 1000, [0, 2]),
        (0.5, 4000, 1000, [0, 2]),
        (0.5, 4001, 1000, [0, 2, 3]),
        (-0.1, 4096, 1000, []),
        (9.0, 4096, 5000, []),
        (9.0, 4096, 4096, []),
    ],
)
def test_f2(remaining, budget, head, expected):
    assert batch_with(head, CANDIDATES, remaining, budget, predict) == expected


def prompt(name, tokens, due, **fields):
    return Seq(name, 0.0, tokens, 1, due=due, ttft_s=due, **fields)


def composed(view, now=0.0):
    return [(seq.id, tokens) for seq, tokens in SloAwareBatching().compose(view, now)]


def test_the_head_and_what_its_slack_carries():
    queue = [prompt("head", 1000, 0.5), *(prompt(f"c{i}", n, 5.0 + i) for i, n in enumerate(CANDIDATES))]
    assert composed(FakeView([], queue, token_budget=8192)) == [("head", 1000), ("c0", 1000), ("c2", 500), ("c3", 1500)]


def test_a_prompt_that_has_begun_goes_on_alone_while_it_is_first():
    begun = prompt("begun", 6000, 2.0, computed=2048)

    assert composed(FakeView([begun], [prompt("other", 100, 9.0)], token_budget=2048)) == [("begun", 2048)]
    assert composed(FakeView([begun], [prompt("urgent", 100, 0.5)], token_budget=2048)) == [("urgent", 100)]


def test_a_full_engine_goes_on_with_what_it_has():
    begun = prompt("begun", 500, 9.0, computed=100)

    view = FakeView([begun, decoding("d")], [prompt("urgent", 10, 0.5)], token_budget=64, max_num_seqs=2)
    assert composed(view) == [("d", 1), ("begun", 63)]
    assert composed(FakeView()) == []


def test_f3_a_request_half_done_is_not_preempted():
    """One prompt at a time, 10 s and 1.5 s of work, in chunks of 0.1 s: both end in time."""
    clock = LatencyCoefficients(1e-9, 0.001, 0.0, 1e-9, 0.0, 0.0)
    engine = InstanceSettings(
        clock,
        kv_tokens=65_536,
        max_num_seqs=2,
        max_num_batched_tokens=100,
        max_model_len=16_384,
        batching="slo_aware_batching",
        batching_settings={"prefill_a": 0.0, "prefill_b": 0.001, "batch_tokens": 1},
    )
    demands = [
        Demand("A", 0.0, 10_000, 1, Targets(11.0, 1.0, None, 3600.0)),
        Demand("C", 9.0, 1_500, 1, Targets(21.0, 1.0, None, 3600.0)),
    ]
    ends = {r.id: r.at + r.ttft_s for r in simulate(demands, "round_robin", (engine,)).records}
    assert ends == pytest.approx({"A": 10.0, "C": 11.5}, abs=1e-4)


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError) as caught:
        SloAwareBatchingConfig(batch_tokens=0)
    assert caught.value.field == "batch_tokens"
