"""Simulated routing of tokens to experts: some ranks hold popular ones, and orders know it only from ended batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from controller.core.errors import ConfigError
from controller.core.noise import standard_normal
from controller.flow.experts import ExpertHistory, expected_traffic, port_loads
from controller.simulator.flows.cluster import PrefillShape


@dataclass(frozen=True, slots=True)
class ExpertSettings:
    """- `skew`: standard deviation of the logarithm of a rank's popularity; 0: all are equally popular.
    - `drift_s`: in so many seconds ranks get a popularity of their own again, by steady steps; infinite: they keep it.
    - `error`: standard deviation of the factor, lognormal with mean 1, by which a batch's share of a rank differs from
      the popularity. One draw for each batch and rank.
    - `by_layer`: each group of layers has popular ranks of its own; else a rank is equally popular in all of them, the
      most unequal that loads can be.
    - `history`: orders expect the shares of ended batches; else even ones.
    """

    skew: float = 0.0
    drift_s: float = math.inf
    error: float = 0.0
    by_layer: bool = False
    history: bool = True

    def __post_init__(self) -> None:
        for field in ("skew", "error"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ConfigError(f"{field} must be finite and not negative", field=field)
        if not self.drift_s > 0:
            raise ConfigError("drift_s must be positive", field="drift_s")

    @property
    def uneven(self) -> bool:
        return self.skew > 0 or self.error > 0


class SimulatedExperts:
    """Where the tokens of batches go, by the draws of `seed`, and where an order expects them to go.

    All instances place experts alike, so one history serves all. Draws are by name, the same under every policy.
    """

    def __init__(self, shape: PrefillShape, settings: ExpertSettings, seed: int) -> None:
        self._shape = shape
        self._settings = settings
        self._seed = seed
        self._history = ExpertHistory()
        self._drawn: dict[str, list[list[float]]] = {}  # shares by batch that has begun, layer group and rank
        self._expected: list[list[float]] | None = None  # by layer group and rank, until a batch ends
        local = shape.ranks - shape.remote_ranks
        self._hosts = [rank // local for rank in range(shape.ranks)]

    def begin(self, batch: str, at: float) -> None:
        """A batch begins to be computed: its tokens go where experts are popular now, but for its error."""
        layers = self._shape.groups if self._settings.by_layer else 1
        drawn = [self._shares(batch, layer, at) for layer in range(layers)]
        self._drawn[batch] = drawn if self._settings.by_layer else drawn * self._shape.groups

    def end(self, batch: str, tokens: float) -> None:
        """It has been computed, and where its tokens went is known."""
        routed = tokens * self._shape.model.experts_per_token
        for layer, shares in enumerate(self._drawn.pop(batch)):
            if routed > 0:
                counts = {rank: routed * share for rank, share in enumerate(shares)}
                self._history.learn(self._shape.model.name, self._shape.ranks, counts, layer)
        self._expected = None

    def sent(self, batch: str, layer: int, tokens: Sequence[float]) -> list[float]:
        """Bytes that each rank sends, and receives, for the experts of a group of layers of a batch that has begun.
        `tokens`: by rank."""
        traffic = expected_traffic(dict(enumerate(tokens)), self._drawn[batch][layer], self._shape.token_bytes)
        loads = port_loads(traffic, self._hosts)
        return [loads.get(rank, 0.0) for rank in range(self._shape.ranks)]

    def slowest(self, batch: str, layer: int) -> float:
        """How much longer than with even shares the rank with the most tokens computes its experts."""
        return max(self._drawn[batch][layer]) * self._shape.ranks

    def expected_loads(self, rank: int, tokens: float, layers: Iterable[int]) -> dict[int, float]:
        """Bytes that `tokens` of one rank are expected to make each rank send, and receive, in these groups."""
        expected = self._expectation()
        together = [sum(each) for each in zip(*(expected[layer] for layer in layers), strict=True)]
        return port_loads(expected_traffic({rank: tokens}, together, self._shape.token_bytes), self._hosts)

    def expected_slowest(self, layers: Sequence[int]) -> float:
        """`slowest` as expected, the mean over these groups."""
        expected = self._expectation()
        return sum(max(expected[layer]) for layer in layers) * self._shape.ranks / len(layers)

    def _expectation(self) -> list[list[float]]:
        if self._expected is None:
            history = self._history if self._settings.history else ExpertHistory()
            name, ranks = self._shape.model.name, self._shape.ranks
            self._expected = [history.shares(name, ranks, layer) for layer in range(self._shape.groups)]
        return self._expected

    def _shares(self, batch: str, layer: int, at: float) -> list[float]:
        deviation = math.sqrt(math.log1p(self._settings.error**2))  # of the factor's logarithm
        weights = []
        for rank in range(self._shape.ranks):
            error = deviation * standard_normal(f"{batch} {layer} {rank}", self._seed)
            popular = self._settings.skew * self._popularity(layer, rank, at)
            weights.append(math.exp(popular + error))
        return [each / sum(weights) for each in weights]

    def _popularity(self, layer: int, rank: int, at: float) -> float:
        """Of a standard normal distribution at each moment, without jumps."""
        whole, part = divmod(at / self._settings.drift_s, 1.0)
        first, second = (
            standard_normal(f"popular {layer} {rank} {step}", self._seed) for step in (int(whole), int(whole) + 1)
        )
        return math.cos(part * math.pi / 2) * first + math.sin(part * math.pi / 2) * second
