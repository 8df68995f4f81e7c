"""Prompt lengths without a tokenizer: characters per token, learned for each model from what engines report.

A decaying mean over requests whose prompt was text, started from the model's configured value. Off by a few per cent
for one kind of text; the engine's own count replaces it in the record.
"""

from __future__ import annotations

import math

from controller.core.snapshot import ModelConfig

DECAY = 0.02  # weight of the newest request
LOWEST, HIGHEST = 0.5, 20.0  # characters per token that any text can have


class PromptEstimates:
    def __init__(self) -> None:
        self._ratios: dict[str, float] = {}

    def tokens(self, model: ModelConfig, exact: int, chars: int) -> int:
        """At least one token; `exact` tokens are known beside the text."""
        return max(1, exact + math.ceil(chars / self.ratio(model)))

    def ratio(self, model: ModelConfig) -> float:
        return self._ratios.get(model.name, model.chars_per_token)

    def observe(self, model: ModelConfig, chars: int, tokens: int) -> None:
        """An engine counted `tokens` for a prompt of `chars` characters."""
        if tokens > 0:
            seen = min(HIGHEST, max(LOWEST, chars / tokens))
            self._ratios[model.name] = self.ratio(model) + DECAY * (seen - self.ratio(model))
