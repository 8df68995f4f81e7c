"""Lengths of prompts and answers, in tokens, before an engine has counted them, and how much of a prompt an instance
finds in its prefix cache.

A prompt that came as text is counted by the model's tokenizer where there is one, else estimated: characters per token,
learned for each model from what engines report, as a decaying mean that starts from the configured value; off by a few
per cent for one kind of text. No tokenizer knows what a chat template adds, since templates are programs of their own:
so many tokens for a conversation and for each message, learned likewise. The engine's own count replaces both in the
record.

The length of an answer is what its kind of traffic produced lately, at most `max_tokens`: a decaying mean for each
(tenant, class, model), then (class, model), then model. The upper bound that Concord learns (a quantile forest) is
another prediction, under a name of its own.

Engines count prompt tokens and, of these, the ones that their prefix cache had, but not of which requests they were.
Requests of one tenant and class tend to share a prefix, so each such kind has a share of its own: an interval between
two reports gives one equation, tokens of each kind times its share = cached tokens, and the shares follow by the
normalised least mean squares rule (Widrow and Hoff 1960; Nagumo and Noda 1967). Each of the last intervals is used
several times (data-reusing LMS, Roy and Shynk 1989), since one interval moves the shares of all its kinds alike, and
intervals with another mix tell them apart; one with few tokens moves them less. Prompts that the engine counted and we
did not, or the other way round, have the mean share. Cost: O(kinds of an interval x LAST_INTERVALS x PASSES).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from controller.core.snapshot import ModelConfig

DECAY = 0.02  # weight of the newest prompt
LOWEST, HIGHEST = 0.5, 20.0  # characters per token that any text can have
MESSAGE_TOKENS = 4.0  # a template's own tokens around each message, about, before any was seen
ODD_TOKENS = 64  # more than this, and as much for each message: images or a hidden system prompt, no template
DEFAULT_TOKENS = 128  # before any answer has ended: between the shortest and longest mean of HyperFlexis' Table 1
ANSWER_DECAY = 0.05  # weight of the newest answer
Kind = tuple[str, str]  # tenant and class
STEP = 0.2  # how far an interval moves the cached shares each time that it is used
LAST_INTERVALS = 12  # that are used
PASSES = 4  # over them, after each interval
FORGET = 0.9  # weight of the mean cached share after another interval
MOST_CACHED = 0.95  # of a prompt; an engine always computes its last block


class PromptText(NamedTuple):
    """A prompt that came as text. `counted`: its tokens without the template's; None without a tokenizer."""

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

    @classmethod
    def of(cls, sums: Sequence[Any]) -> TemplateTokens:
        made = cls()
        if len(sums) != len(made._sums):
            raise ValueError("sums of another count")
        made._sums = [_finite(each) for each in sums]
        return made

    def predict(self, messages: int) -> float:
        guesses = [(1, MESSAGE_TOKENS), (4, 4 * MESSAGE_TOKENS)]
        w, n, nn, t, nt = self._sums
        for count, tokens in guesses:
            w, n, nn, t, nt = w + 0.1, n + 0.1 * count, nn + 0.1 * count**2, t + 0.1 * tokens, nt + 0.1 * count * tokens
        each = (w * nt - n * t) / (w * nn - n * n)
        return max(0.0, (t - each * n) / w + each * messages)


class PromptEstimates:
    """Tokens of prompts that came as text, by model."""

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

    def state(self) -> dict[str, Any]:
        """All that was learned, as JSON can hold it."""
        templates = {model: list(each._sums) for model, each in self._templates.items()}
        return {"ratios": dict(self._ratios), "templates": templates, "errors": dict(self._errors)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError, and changes nothing, for anything else than a state."""
        ratios, errors = (_named_numbers(state[part]) for part in ("ratios", "errors"))
        templates = {str(model): TemplateTokens.of(sums) for model, sums in dict(state["templates"]).items()}
        self._ratios, self._errors, self._templates = ratios, errors, templates

    def errors(self) -> dict[str, float]:
        """By model: mean of |predicted - counted| / counted over the last requests whose prompt was text."""
        return dict(self._errors)


class OutputLengthModel:
    """Memory is bounded: one pair of numbers for each kind of traffic."""

    def __init__(self, default: int = DEFAULT_TOKENS, decay: float = ANSWER_DECAY) -> None:
        self._default = default
        self._decay = decay
        self._means: dict[tuple[str, ...], tuple[int, float]] = {}

    def predict(self, tenant: str, slo_class: str, model: str, max_tokens: int | None) -> int:
        """Expected output tokens, from 1 to `max_tokens`."""
        expected = float(self._default)
        for key in ((tenant, slo_class, model), (slo_class, model), (model,)):
            known = self._means.get(key)
            if known is not None and known[0] >= 3:
                expected = known[1]
                break
        bound = max_tokens if max_tokens is not None and max_tokens > 0 else expected
        return max(1, round(min(expected, bound)))

    def observe(self, tenant: str, slo_class: str, model: str, output_tokens: int) -> None:
        """Learn from a request that ended normally with this many tokens."""
        for key in ((tenant, slo_class, model), (slo_class, model), (model,)):
            count, mean = self._means.get(key, (0, 0.0))
            weight = max(self._decay, 1.0 / (count + 1))
            self._means[key] = (count + 1, mean + weight * (output_tokens - mean))

    def state(self) -> list[Any]:
        return [[list(key), count, mean] for key, (count, mean) in self._means.items()]

    def restore(self, state: Sequence[Any]) -> None:
        """Raises TypeError or ValueError, and changes nothing, for anything else than a state."""
        self._means = {tuple(map(str, key)): (int(count), _finite(mean)) for key, count, mean in state}


class CachedShares:
    """`cached(kind, tokens)`: prompt tokens that need no prefill; 0 for a kind that was never seen."""

    __slots__ = ("_counted", "_last", "_shares")

    def __init__(self) -> None:
        self._shares: dict[Kind, float] = {}
        self._last: deque[tuple[Mapping[Kind, int], float]] = deque(maxlen=LAST_INTERVALS)
        self._counted = (0.0, 0.0)  # prompt tokens and of these cached, of late

    def __bool__(self) -> bool:
        """Was anything found in the prefix cache yet?"""
        return bool(self._shares)

    def cached(self, kind: Kind, tokens: int) -> int:
        return int(tokens * self._shares.get(kind, 0.0))

    @property
    def by_kind(self) -> Mapping[Kind, float]:
        """Parts of prompts; kinds without one were never seen. Read only, and it goes on to be learned."""
        return self._shares

    def state(self) -> list[Any]:
        return [[*kind, share] for kind, share in self._shares.items()]

    @classmethod
    def of(cls, state: Sequence[Any]) -> CachedShares:
        """Raises TypeError or ValueError for anything else than a state."""
        made = cls()
        made._shares = {
            (str(tenant), str(name)): min(MOST_CACHED, max(0.0, _finite(share))) for tenant, name, share in state
        }
        return made

    def observe(self, prompts: Mapping[Kind, int], counted: int, cached: int) -> None:
        """One interval: our prompt tokens by kind, those that the engine counted of all prompts, and how many of these
        were cached."""
        if not cached and not self._shares:
            return  # an engine without a prefix cache costs nothing
        cached = min(cached, counted)
        self._counted = self._counted[0] * FORGET + counted, self._counted[1] * FORGET + cached
        ours = sum(prompts.values())
        if not ours:
            return
        mean = self._counted[1] / self._counted[0] if self._counted[0] else 0.0
        self._last.append((dict(prompts), min(ours, max(0.0, cached - (counted - ours) * mean))))
        squares = [sum(tokens * tokens for tokens in each.values()) for each, _ in self._last]
        mean_square = sum(squares) / len(squares)
        for _ in range(PASSES):
            for (each, found), square in zip(self._last, squares, strict=True):
                self._learn(each, found, STEP / max(square, mean_square))

    def _learn(self, prompts: Mapping[Kind, int], cached: float, step: float) -> None:
        wrong = cached - sum(tokens * self._shares.get(kind, 0.0) for kind, tokens in prompts.items())
        for kind, tokens in prompts.items():
            share = self._shares.get(kind, 0.0) + step * wrong * tokens
            self._shares[kind] = min(MOST_CACHED, max(0.0, share))


def _finite(raw: Any) -> float:
    number = float(raw)
    if not math.isfinite(number):
        raise ValueError("a number is not finite")
    return number


def _named_numbers(raw: Any) -> dict[str, float]:
    return {str(name): _finite(value) for name, value in dict(raw).items()}
