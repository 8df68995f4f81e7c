"""The stand-in for FlowPrefill's trace against the paper's Tables 1 and 2."""

import numpy as np
import pytest

from controller.core.errors import UnknownName
from controller.simulator.experiment import parse_experiment
from controller.simulator.workloads import qwen

TABLE_1 = {  # mean, deviation, P99
    "text": (590, 652, 3040),
    "image": (532, 510, 2764),
    "search": (5976, 3456, 16635),
    "file": (6833, 5186, 22390),
}


@pytest.mark.parametrize("kind", sorted(TABLE_1))
def test_lengths_are_those_of_table_1(kind):
    mean, deviation, p99 = TABLE_1[kind]
    drawn = qwen.PROMPTS[kind][1].draw(np.random.default_rng(1), 200_000)
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    assert drawn.std() == pytest.approx(deviation, rel=0.03)
    assert np.quantile(drawn, 0.99) == pytest.approx(p99, rel=0.11)


def test_shares_and_targets_are_those_of_the_tables():
    found = qwen.demands(qwen.tasks("qwen2.5-14b"), 3.0, 1, 20_000)
    shares = {kind: sum(d.slo_class == kind for d in found) / len(found) for kind in TABLE_1}
    assert shares == pytest.approx({"text": 0.68, "image": 0.08, "search": 0.20, "file": 0.04}, abs=0.01)
    assert {d.slo_class: d.targets.ttft_s for d in found} == {"text": 0.4, "image": 0.8, "search": 6.5, "file": 9.0}
    assert len(found) / found[-1].at == pytest.approx(3.0, rel=0.03)


def test_rates_stretch_the_same_requests():
    slow, fast = (qwen.demands(qwen.tasks("llama3-8b"), rate, 5, 300) for rate in (1.0, 4.0))
    assert [(d.id, d.prompt_tokens) for d in slow] == [(d.id, d.prompt_tokens) for d in fast]
    assert [d.at for d in slow] == pytest.approx([4.0 * d.at for d in fast])


def test_answers_and_scaled_targets():
    chosen = qwen.tasks("llama3-8b", slo_scale=0.5, decode=True, ttft_factor=3.0)
    assert {task.name: (task.targets.ttft_s, task.targets.tpot_s) for task in chosen} == {
        "text": (0.375, 0.1),
        "image": (0.75, 0.1),
        "search": (6.0, 0.2),
        "file": (9.0, 0.2),
    }
    assert np.mean([d.output_tokens for d in qwen.demands(chosen, 2.0, 1, 5000)]) == pytest.approx(343, rel=0.05)


def test_an_unknown_model_is_refused():
    with pytest.raises(UnknownName) as caught:
        qwen.tasks("gpt-4")
    assert caught.value.field == "model"


def test_an_experiment_may_name_it():
    profile = {"prefill": {"a": 0.007, "b": 5e-5, "c": 1e-9}, "decode": {"a": 0.01, "b": 1e-7, "c": 1e-5}}
    experiment = parse_experiment(
        {
            "instances": {"profile": profile, "max_model_len": 65536},
            "workload": {"kind": "mix", "mix": "qwen-llama3-8b", "rate": 2.0, "duration_s": 30},
        },
        lambda name: {},
        lambda name: [],
    )
    assert {d.slo_class for d in experiment.workload.demands(5.0, 1)} == set(TABLE_1)
