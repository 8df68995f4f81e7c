"""The plug-in's settings, and what it decides, without vLLM. Scheduling by vLLM itself: tests/vllm."""

from __future__ import annotations

import math
from typing import Any

import pytest

from controller.core.errors import ConfigError
from controller.core.estimates import Estimate, ToldBounds
from controller.core.steps import Chunk, Seq, Step, StepRan
from workers.vllm_plugin.policy import EngineNow, PluginSettings, due_of, policy_of, settings_from
from workers.vllm_plugin.versions import UnsupportedVllm, check_version


def seq(name: str, due: float, prompt: int = 100, **more: Any) -> Seq:
    return Seq(name, 0.0, prompt, 50, due=due, ttft_s=10.0, tpot_s=0.5, **more)


def order(settings: PluginSettings, *queue: Seq, now: float = 0.0) -> list[str]:
    plan = policy_of(settings, 4).plan(EngineNow(2048, 4, [], list(queue)), now)
    assert plan is not None
    return [each.id for each in plan.waiting]


QUEUE = (seq("far", 9.0), seq("near", 2.0), seq("missed", -1.0), seq("open", math.inf))


def test_each_order_has_its_own_way_with_what_is_late() -> None:
    assert order(PluginSettings("s_edf"), *QUEUE) == ["near", "far", "open", "missed"]
    assert order(PluginSettings("edf"), *QUEUE) == ["missed", "near", "far", "open"]
    assert order(PluginSettings("calm"), *QUEUE)[-1] == "missed"


@pytest.mark.parametrize("name", ["s_edf", "edf", "fcfs"])
def test_requests_that_are_equal_keep_the_order_of_vllms_queue(name: str) -> None:
    assert order(PluginSettings(name), *(seq(each, 5.0) for each in "cab")) == ["c", "a", "b"]


def test_slack_counts_the_prompts_own_time_as_measured() -> None:
    """A prompt of 1,000 tokens that is due in 1 s can be in time at 20,000 tokens/s, and not at 100."""
    policy = policy_of(PluginSettings("s_edf"), 4)
    queue = [seq("long", 1.0, prompt=1000), seq("short", 5.0, prompt=10)]

    def first() -> str:
        plan = policy.plan(EngineNow(2048, 4, [], queue), 0.0)
        assert plan is not None
        return plan.waiting[0].id

    assert first() == "long"
    policy.observe(StepRan(Step(1, (Chunk(seq("other", 1.0), 0, 100, True),), (), 0), 1, 1.0), 0.0)
    assert first() == "short"


def test_a_full_engine_needs_no_order() -> None:
    running = [seq(str(at), 1.0) for at in range(4)]
    assert policy_of(PluginSettings(), 4).plan(EngineNow(2048, 4, running, list(QUEUE)), 0.0) is None


def test_after_an_eviction_the_next_token_is_due_not_the_first() -> None:
    assert due_of(seq("x", 2.0, output_tokens=10)) == 7.0


def test_an_answers_own_deadline_counts_where_it_is_earlier() -> None:
    answer = seq("answer", math.inf, estimate=Estimate(ToldBounds(5, 9), 10.0, due=3.0, latest=3.0))
    assert order(PluginSettings("s_edf"), *QUEUE, answer) == ["near", "answer", "far", "open", "missed"]


def test_calm_takes_the_seat_of_one_that_is_lost() -> None:
    lost = seq("lost", -50.0, output_tokens=3, computed=102)
    policy = policy_of(PluginSettings("calm"), 1)
    plan = policy.plan(EngineNow(2048, 1, [lost], [seq("able", 5.0)]), 0.0)
    assert plan is not None
    assert ([each.id for each in plan.waiting], [each.id for each in plan.evicted]) == (["able"], ["lost"])


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"order": "soonest"}, "slackline.order"), ({"decode": "some"}, "slackline.decode"),
        ({"policy": "edf"}, "slackline.policy"), ({"order": "calm", "decode": "kairos_decode"}, "slackline.decode"),
        ({"order_options": {"a": 1}}, "slackline.order_options"), ([], "slackline"),
        ({"decode_options": {"reserve": "solo"}}, "slackline.decode_options"),
        ({"order_options": 3}, "slackline.order_options"),
    ],
)  # fmt: skip
def test_settings_that_do_not_exist_or_have_no_effect_are_refused(given: object, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_from({"slackline": given})
    assert caught.value.field == field


def test_options_go_to_their_policy() -> None:
    with pytest.raises(ConfigError, match="reserve") as caught:
        policy_of(PluginSettings(decode="kairos_decode", decode_options={"reserve": "none"}), 4)
    assert caught.value.field == "slackline.decode_options.reserve"
    assert settings_from({}) == settings_from(None) == PluginSettings()


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.32.1rc1", "0.32"])
def test_a_tested_version_is_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.33.0", "0.31.2", "0.320.0", "1.0", "dev"])
def test_another_version_is_refused_by_name(version: str) -> None:
    with pytest.raises(
        UnsupportedVllm, match=r"supports vLLM 0\.32\.x, and this is vLLM " + version.replace(".", r"\.")
    ):
        check_version(version)
