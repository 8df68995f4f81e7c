"""A batching policy by name with options as JSON gives them."""

from math import inf

import pytest

from controller.core.errors import ConfigError, UnknownName
from controller.policies.batching import BATCHINGS
from controller.policies.batching.options import build


@pytest.mark.parametrize("name", sorted(BATCHINGS))
def test_without_options_it_has_its_defaults(name):
    assert build(name, {}).config == BATCHINGS[name].Config()


def test_options_of_every_kind():
    config = build("calm", {"cutoffs": [0.9], "token_s": 1, "rectangles": True, "preemption": {"threshold": 1}}).config
    assert (list(config.cutoffs), config.token_s, config.rectangles, config.preemption.threshold) == ([0.9], 1, True, 1)
    assert build("kairos_decode", {"profile": "longest"}).config.profile == "longest"
    assert build("chunked_prefill", {"long_prefill_tokens": None}).config.long_prefill_tokens is None
    assert build("least_attained_service", {"starvation": inf}).config.starvation == inf


def test_an_unknown_policy_lists_the_known():
    with pytest.raises(UnknownName, match="calm"):
        build("clam", {})


@pytest.mark.parametrize(
    ("name", "options", "field", "complaint"),
    [
        ("calm", {"slot": 9}, "b.slot", "batching calm has no setting 'slot'; valid: by_chance, commit, "),
        ("credit_based", {"x": 1}, "b.x", "valid: none"),
        ("calm", {"slots": 9.0}, "b.slots", "slots must be a whole number, is 9.0"),
        ("calm", {"slots": True}, "b.slots", "slots must be a whole number, is True"),
        ("calm", {"commit": float("nan")}, "b.commit", "commit must be a number"),
        ("calm", {"commit": "1"}, "b.commit", "commit must be a number"),
        ("calm", {"commit": 2}, "b.commit", r"commit must lie in \[0, 1\]"),
        ("calm", {"cutoffs": "0.9"}, "b.cutoffs", "cutoffs must be a list"),
        ("calm", {"preemption": 3}, "b.preemption", "preemption must be an object"),
        ("calm", {"preemption": {"x": 3}}, "b.preemption.x", "calm.preemption has no setting 'x'"),
        ("kairos_decode", {"profile": 3}, "b.profile", "profile must be text"),
        ("kairos_decode", {"profile": "mean"}, "b.profile", "unknown profile 'mean'; valid: equal, longest"),
        ("kairos_decode", {"decode_a": -1.0}, "b.decode_a", "must be positive"),
        ("chunked_prefill", {"long_prefill_tokens": 1.5}, "b.long_prefill_tokens", "a whole number"),
    ],
)
def test_a_wrong_option_is_named(name, options, field, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        build(name, options, "b")
    assert caught.value.field == field
