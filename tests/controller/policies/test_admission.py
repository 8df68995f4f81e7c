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
    exact = TtftProbability(Config(error=0.0, measured=False))
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


def test_how_late_first_tokens_came_moves_the_chance_by_instance_and_class():
    late, other = ShadowInstance(InstanceSpec("late", "m")), ShadowInstance(InstanceSpec("other", "m"))
    policy, now = TtftProbability(), 0.0
    for i in range(40):
        sent = Request(f"x{i}", now, Targets(9, 9), 100, 10, slo_class="chat")
        late.send(sent, now, 0, i)
        now += late.waiting_prefill_s() + (0.2 if i % 2 else 0.24)
        late.first_token(sent.id, now)
        late.remove(sent.id)
    chat, batch = (Request("r", now, Targets(0.5, 0.5), 100, 10, slo_class=name) for name in ("chat", "batch"))
    assert late.first_token_error(chat) == pytest.approx((0.22, 0.02), abs=0.001)
    assert late.first_token_error(batch) == late.first_token_error(chat)  # none of its own was seen
    assert other.first_token_error(chat) == (0.0, 0.0)
    chances = [policy.judge(chat, COST, late, 0.0, now + waited).probability for waited in (0.0, 0.1, 0.13, 0.16, 0.3)]
    assert chances == sorted(chances, reverse=True)
    assert chances[2] == pytest.approx(0.5, abs=0.05)
    assert policy.judge(chat, COST, other, 0.0, now + 0.3).admit


def test_theta_decides():
    instance = ShadowInstance(InstanceSpec("w", "m"))
    assert TtftProbability(Config(theta=0.4, measured=False)).judge(REQUEST, COST, instance, 0.0, 0.55).admit
    assert not TtftProbability(Config(theta=0.6, measured=False)).judge(REQUEST, COST, instance, 0.0, 0.55).admit


def test_a_deadline_makes_long_answers_hopeless_earlier():
    long = Request("r", 0.0, Targets(5.0, 0.5, 4.0), 100, 101)
    assert TtftProbability().hopeless_at(long, COST) == pytest.approx(4.0 - 0.15 - 100 * 0.02)


@pytest.mark.parametrize(("field", "value"), [("theta", 0.0), ("theta", 1.0), ("error", -1)])
def test_bad_settings_name_the_field(field, value):
    with pytest.raises(ConfigError) as caught:
        Config(**{field: value})
    assert caught.value.field == field
