"""What a bound on the length of an answer is predicted from, and how its level follows what was observed (Concord 4.1).

Features are numbers that a gateway can read from a request or remembers of earlier ones; no text. `LengthHistory` keeps
what it remembers: for each kind of traffic (tenant, class, model) a fading mean of the answers, and for each workflow
its last call. Its memory is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

FEATURES = (
    "prompt_tokens",
    "max_tokens",  # 0: none was given
    "kind_mean",  # recent mean of the answers of this kind, tokens; 0 before the first
    "workflow_calls",  # before this one
    "workflow_answer",  # tokens of the last one, 0 before the first
    "workflow_growth",  # tokens of this prompt beyond the last one's
)
NEWEST = 0.2  # weight of the newest answer in the mean of its kind
MOST_KINDS, MOST_WORKFLOWS = 10_000, 50_000
TARGET = 0.9  # share of the answers that the upper bound is to cover
STEP = 0.01
LEAST_LEVEL, MOST_LEVEL = 0.5, 0.995

Kind = tuple[str, ...]


class _Call(NamedTuple):
    calls: int
    prompt_tokens: int
    answer_tokens: int


class LengthHistory:
    """Answers so far. Kinds and workflows that were not used for longest are forgotten first."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Kind, float] = OrderedDict()
        self._workflows: OrderedDict[tuple[Kind, str], _Call] = OrderedDict()

    def features(self, kind: Kind, workflow: str, prompt_tokens: int, max_tokens: int | None) -> tuple[float, ...]:
        """As FEATURES. `workflow`: "" for none."""
        last = self._workflows.get((kind, workflow), _Call(0, prompt_tokens, 0)) if workflow else _Call(0, 0, 0)
        return (
            float(prompt_tokens),
            float(max_tokens or 0),
            self._kinds.get(kind, 0.0),
            float(last.calls),
            float(last.answer_tokens),
            float(prompt_tokens - last.prompt_tokens) if workflow else 0.0,
        )

    def observe(self, kind: Kind, workflow: str, prompt_tokens: int, answer_tokens: int) -> None:
        """An answer ended by itself."""
        mean = self._kinds.pop(kind, float(answer_tokens))
        self._kinds[kind] = mean + NEWEST * (answer_tokens - mean)
        if len(self._kinds) > MOST_KINDS:
            self._kinds.popitem(last=False)
        if workflow:
            last = self._workflows.pop((kind, workflow), _Call(0, 0, 0))
            self._workflows[kind, workflow] = _Call(last.calls + 1, prompt_tokens, answer_tokens)
            if len(self._workflows) > MOST_WORKFLOWS:
                self._workflows.popitem(last=False)


class AdaptiveLevel:
    """The level at which the forest is asked, so that TARGET of the bounds hold whatever traffic has become (Gibbs and
    Candes, "Adaptive conformal inference under distribution shift", NeurIPS 2021): after each answer the level rises by
    STEP x TARGET if its bound was too low, and falls by STEP x (1 - TARGET) if it held."""

    def __init__(self, target: float = TARGET, step: float = STEP) -> None:
        self.target = target
        self.level = target
        self._step = step

    def observe(self, held: bool) -> None:
        moved = self.level + self._step * (self.target - held)
        self.level = min(MOST_LEVEL, max(LEAST_LEVEL, moved))
