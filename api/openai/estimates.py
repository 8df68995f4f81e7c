"""Prompt lengths before an engine has counted them: by the model's tokenizer where there is one, else estimated.

Without a tokenizer: characters per token, learned for each model from what engines report, a decaying mean started from
the model's configured value; off by a few per cent for one kind of text. What a chat template adds no tokenizer tells
(templates are programs of their own): so many tokens a conversation and so many a message, learned likewise. The
engine's own count replaces either in the record.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from controller.core.snapshot import ModelConfig

DECAY = 0.02  # weight of the newest request
LOWEST, HIGHEST = 0.5, 20.0  # characters per token that any text can have
MESSAGE_TOKENS = 4.0  # a template's own tokens around each message, about, before any was seen
ODD_TOKENS = 64  # more than this and as much a message: images or a hidden system prompt, no template


class PromptText(NamedTuple):
    """Of a prompt that came as text. `counted`: its tokens without the template's, None where nobody counted."""

    chars: int = 0
    counted: int | None = None
    messages: int = 0  # of a conversation


NO_TEXT = PromptText()


class TemplateTokens:
    """base + each x messages, least squares with forgetting; two guesses keep it solvable while all are alike."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # weight, n, n^2, tokens, n x tokens

    def observe(self, messages: int, tokens: int) -> None:
        seen = (1.0, messages, messages * messages, tokens, messages * tokens)
        self._sums = [(1 - DECAY) * old + new for old, new in zip(self._sums, seen, strict=True)]

    def predict(self, messages: int) -> float:
        guesses = [(1, MESSAGE_TOKENS), (4, 4 * MESSAGE_TOKENS)]
        w, n, nn, t, nt = self._sums
        for count, tokens in guesses:
            w, n, nn, t, nt = w + 0.1, n + 0.1 * count, nn + 0.1 * count**2, t + 0.1 * tokens, nt + 0.1 * count * tokens
        each = (w * nt - n * t) / (w * nn - n * n)
        return max(0.0, (t - each * n) / w + each * messages)


class PromptEstimates:
    def __init__(self) -> None:
        self._ratios: dict[str, float] = {}
        self._templates: dict[str, TemplateTokens] = {}
        self._errors: dict[str, float] = {}

    def tokens(self, model: ModelConfig, text: PromptText) -> int:
        """At least one token."""
        if text.counted is None:
            added = MESSAGE_TOKENS * text.messages
            return max(1, math.ceil(added + text.chars / self.ratio(model)))
        template = self._templates.get(model.name) or TemplateTokens()
        added = template.predict(text.messages) if text.messages else 0.0
        return max(1, text.counted + round(added))

    def ratio(self, model: ModelConfig) -> float:
        return self._ratios.get(model.name, model.chars_per_token)

    def observe(self, model: ModelConfig, text: PromptText, predicted: int, tokens: int) -> None:
        """An engine counted `tokens` for a prompt that was taken to have `predicted`."""
        if tokens <= 0:
            return
        seen = min(HIGHEST, max(LOWEST, text.chars / tokens))
        self._ratios[model.name] = self.ratio(model) + DECAY * (seen - self.ratio(model))
        error = abs(predicted - tokens) / tokens
        self._errors[model.name] = self._errors.get(model.name, error) * (1 - DECAY) + DECAY * error
        if text.counted is not None and text.messages:
            added = tokens - text.counted
            if 0 <= added <= ODD_TOKENS * (1 + text.messages):
                self._templates.setdefault(model.name, TemplateTokens()).observe(text.messages, added)

    def errors(self) -> dict[str, float]:
        """By model: mean of |predicted - counted| / counted over the last requests whose prompt was text."""
        return dict(self._errors)
