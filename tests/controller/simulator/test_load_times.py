"""HyperFlexis Table 2 as defaults: by model where its name says how large it is."""

import pytest

from controller.core.errors import ConfigError
from controller.simulator.experiment import parse_experiment
from controller.simulator.load_times import LOAD_S, TABLE_2, load_times

SPEED = {"prefill": {"a": 0.004, "b": 5e-5, "c": 1e-9}, "decode": {"a": 0.006, "b": 1e-7, "c": 1e-4}}


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("Qwen2.5-7B", 7), ("Llama-3.1-8B", 7), ("aic/Qwen2.5-7B/A100", 7), ("Qwen3-32B", 32), ("qwen3-30b-a3b", 32),
        ("llama-2-70b", 70), ("Qwen2.5-72B-Instruct", 70),
    ],
)  # fmt: skip
def test_a_model_takes_the_column_of_its_size(model, billions):
    assert load_times(model) == TABLE_2[billions]


@pytest.mark.parametrize("model", ["", "model", "demo", "Qwen2.5-14B", "OPT-1.3B", "llama-405b", "v2.7beta", "0B"])
def test_any_other_takes_the_smallest(model):
    assert load_times(model) is LOAD_S == TABLE_2[7]


def elastic(profile, instance=None, **asked):
    raw = {
        "instances": {"profile": {**SPEED, **profile}, **(instance or {})},
        "workload": {"kind": "mix", "mix": "2-task", "per_task": 1, "rate": 1.0},
        "settings": {"elastic": {"max_instances": 4, **asked}},
    }
    return parse_experiment(raw, None, None).settings.elastic


def test_an_experiment_loads_as_long_as_its_profiles_model():
    assert elastic({}).load_s == dict(LOAD_S)
    assert elastic({"model": "Qwen3-32B"}).load_s == {"device": 2.05, "host": 19.41, "disk": 28.84}
    assert elastic({"model": "Llama-3.3-70B"}).load_s == {"device": 1.16, "host": 11.50, "disk": 22.58}


def test_what_the_file_says_goes_before_what_is_known():
    assert elastic({"model": "Qwen3-32B"}, {"weights_of": "Qwen2.5-7B"}).load_s == dict(LOAD_S)
    assert elastic({}, {"model": "llama-70b"}).load_s["disk"] == 22.58
    assert elastic({"model": "Qwen3-32B"}, load_s={"disk": 3.0}).load_s == {"device": 2.05, "host": 19.41, "disk": 3.0}


def test_a_scale_out_of_a_larger_model_takes_longer():
    from controller.simulator.runner import run_once

    served = {}
    for model in ("Qwen2.5-7B", "Qwen3-32B"):
        raw = {
            "instances": {"profile": {**SPEED, "model": model}, "max_num_seqs": 4},
            "workload": {"kind": "mix", "mix": "4-task", "per_task": 100, "rate": 30.0},
            "settings": {"elastic": {"max_instances": 2, "source": "disk", "interval_s": 0.5}},
        }
        experiment = parse_experiment(raw, None, None)
        (added, *_) = run_once(experiment, experiment.contenders[0], None, 1).scaled_out
        served[model] = added.up_at - added.asked_at
    assert served == {"Qwen2.5-7B": pytest.approx(4.14), "Qwen3-32B": pytest.approx(28.84)}


def test_weights_are_a_name():
    with pytest.raises(ConfigError) as caught:
        elastic({}, {"weights_of": 7})
    assert caught.value.field == "instances.weights_of"
