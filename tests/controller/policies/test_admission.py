"""H8: time left for a first token and the probability made of it."""

import pytest

from controller.core.errors import ConfigError
from controller.core.policy import Cost
from controller.core.types import InstanceSpec, Request, Targets
from controller.dispatch.shadow_state import ShadowInstance
from controller.policies.admission.ttft_probability import Config, TtftProbability, probability

REQUEST = Request("r", 0.0, Targets(0.7, 0.5), 100, 10)
COST = Cost(0.15, 0.2, 0.02)


def test_h8_a_predictor_without_error_answers_yes_or_no():
    exact = TtftProbability(Config(error=0.0))
    instance = ShadowInstance(InstanceSpec("w", "m"))
    assert exact.judge(REQUEST, COST, instance, 0.0, 0.5).probability == 1.0
    assert exact.judge(REQUEST, COST, instance, 0.0, 0.6).probability == 0.0
    assert exact.hopeless_at(REQUEST, COST) == pytest.approx(0.55)
    assert [exact.hopeless_at(REQUEST, COST) - now for now in (0.5, 0.6)] == pytest.approx([0.05, -0.05])


def test_probability_never_falls_in_time_left():
    values = [probability(t / 100, 0.05) for t in range(-50, 50)]
    assert values == sorted(values)
    assert min(values) >= 0
    assert max(values) <= 1
    assert probability(0.0, 0.05) == 0.5


def test_probability_never_rises_in_utilisation():
    policy = TtftProbability(Config(margin_s=0.2))
    instance = ShadowInstance(InstanceSpec("w", "m", max_num_seqs=10))
    seen = []
    for i in range(10):
        seen.append(policy.judge(REQUEST, COST, instance, 0.0, 0.4).probability)
        instance.send(Request(f"x{i}", 0.0, Targets(1, 1), 10, 10), 0.0, 0, i)
    assert seen == sorted(seen, reverse=True)
    assert seen[0] > seen[-1]


def test_theta_decides():
    instance = ShadowInstance(InstanceSpec("w", "m"))
    assert TtftProbability(Config(theta=0.4)).judge(REQUEST, COST, instance, 0.0, 0.55).admit
    assert not TtftProbability(Config(theta=0.6)).judge(REQUEST, COST, instance, 0.0, 0.55).admit


def test_a_deadline_makes_long_answers_hopeless_earlier():
    long = Request("r", 0.0, Targets(5.0, 0.5, 4.0), 100, 101)
    assert TtftProbability().hopeless_at(long, COST) == pytest.approx(4.0 - 0.15 - 100 * 0.02)


@pytest.mark.parametrize(("field", "value"), [("theta", 0.0), ("theta", 1.0), ("error", -1), ("margin_s", -1)])
def test_bad_settings_name_the_field(field, value):
    with pytest.raises(ConfigError) as caught:
        Config(**{field: value})
    assert caught.value.field == field
