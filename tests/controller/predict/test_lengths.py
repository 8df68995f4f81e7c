"""Lengths of prompts and answers before an engine has counted them."""

from __future__ import annotations

import pytest

from controller.core.snapshot import ModelConfig
from controller.predict.lengths import (
    DEFAULT_TOKENS,
    MESSAGE_TOKENS,
    OutputLengthModel,
    PromptEstimates,
    PromptText,
    TemplateTokens,
)


def test_before_anything_finished_the_default_is_capped() -> None:
    model = OutputLengthModel()
    assert model.predict("t", "c", "m", None) == DEFAULT_TOKENS
    assert model.predict("t", "c", "m", 10) == 10
    assert model.predict("t", "c", "m", 0) == DEFAULT_TOKENS


def test_it_learns_by_kind_and_falls_back_to_wider_kinds() -> None:
    model = OutputLengthModel()
    for _ in range(20):
        model.observe("acme", "headline", "m", 14)
    assert model.predict("acme", "headline", "m", 1000) == 14
    assert model.predict("other", "headline", "m", 1000) == 14
    assert model.predict("other", "other", "m", 1000) == 14
    assert model.predict("other", "other", "n", 1000) == DEFAULT_TOKENS


def test_it_follows_a_change() -> None:
    model = OutputLengthModel()
    for _ in range(50):
        model.observe("t", "c", "m", 100)
    for _ in range(100):
        model.observe("t", "c", "m", 10)
    assert model.predict("t", "c", "m", None) <= 12


def test_a_template_is_found_from_conversations_of_several_lengths() -> None:
    template = TemplateTokens()
    assert template.predict(3) == pytest.approx(3 * MESSAGE_TOKENS)
    for turn in range(100):
        messages = 1 + turn % 7
        template.observe(messages, 12 + 5 * messages)
    assert template.predict(1) == pytest.approx(17, abs=0.2)
    assert template.predict(40) == pytest.approx(212, abs=2)


def test_what_no_template_adds_is_not_learned() -> None:
    estimates, demo = PromptEstimates(), ModelConfig("demo")
    text = PromptText(chars=40, counted=10, messages=1)
    before = estimates.tokens(demo, text)
    estimates.observe(demo, text, before, 10 + 5_000)  # an image
    estimates.observe(demo, text, before, 4)  # a cached prefix left out
    assert estimates.tokens(demo, text) == before


def test_the_error_of_predictions_is_kept() -> None:
    estimates, demo = PromptEstimates(), ModelConfig("demo")
    estimates.observe(demo, PromptText(chars=40), 10, 20)
    assert estimates.errors() == {"demo": 0.5}
    estimates.observe(demo, PromptText(chars=40), 20, 20)
    assert 0.4 < estimates.errors()["demo"] < 0.5
