"""Refits an instance's latency model from the progress of its streams, which the gateway sees anyway.

While one request decodes from token i to token j, the engine runs j - i steps, and the work of these steps adds up:

    elapsed = steps * (a' + b' * context + c' * batch) + b * prefilled tokens + c * their squares

which is linear in the coefficients. Recursive normal equations with forgetting keep the newest few hundred intervals in
30 numbers. The profile that an instance starts with enters as a few intervals, so that the first unusual ones cannot
move the fit far, and fades as measurements come in. The prefill constant `a` cannot be seen this way (mixed steps pay
the larger constant once) and keeps its profiled value.
"""

from __future__ import annotations

from controller.core.types import LatencyCoefficients
from controller.predict.latency_fit import solve_nonnegative

COLUMNS = 5  # a', b', c', b, c
LEAST_PRIOR = 0.005  # final weight of the profile, which keeps coefficients that the traffic never shows


class OnlineFit:
    """`forgetting`: per interval (0.995: about 200 intervals count). `every`: intervals between two refits."""

    def __init__(
        self, prior: LatencyCoefficients, *, prior_weight: float = 20.0, forgetting: float = 0.995, every: int = 25
    ) -> None:
        self.coefficients = prior
        self.samples = 0
        self._prior = prior
        self._prior_weight = prior_weight
        self._forgetting = forgetting
        self._every = every
        self._matrix = [[0.0] * COLUMNS for _ in range(COLUMNS)]
        self._right = [0.0] * COLUMNS

    def observe(self, steps: int, batch: float, context_sum: float, tokens: int, squares: int, seconds: float) -> bool:
        """Add an interval of `steps` engine steps; True if the coefficients were refitted."""
        if steps <= 0 or seconds <= 0:
            return False
        row = (float(steps), steps * context_sum, steps * batch, float(tokens), float(squares))
        self._add([value / seconds for value in row], 1.0, self._forgetting)
        self.samples += 1
        if self.samples % self._every:
            return False
        self._refit()
        return True

    def _add(self, scaled: list[float], weight: float, keep: float) -> None:
        self._right = [old * keep + weight * value for old, value in zip(self._right, scaled, strict=True)]
        for row, value in zip(self._matrix, scaled, strict=True):
            weighed = weight * value
            row[:] = [old * keep + weighed * other for old, other in zip(row, scaled, strict=True)]

    def _refit(self) -> None:
        """Solve the measured rows and the prior rows together."""
        matrix = [list(row) for row in self._matrix]
        right = list(self._right)
        for row in _prior_rows(self._prior):
            weight = self._prior_weight / 5 * max(LEAST_PRIOR, self._forgetting**self.samples)
            for i in range(COLUMNS):
                right[i] += weight * row[i]
                for j in range(COLUMNS):
                    matrix[i][j] += weight * row[i] * row[j]
        a, context, batch, linear, quadratic = solve_nonnegative(matrix, right)
        prior = self._prior
        # A coefficient never falls below a tenth of its profile: with a free prefill everything would be admitted.
        self.coefficients = LatencyCoefficients(
            prior.prefill_a,
            max(linear, 0.1 * prior.prefill_b),
            quadratic,
            max(a, 0.1 * prior.decode_a),
            context,
            batch,
        )


def _prior_rows(prior: LatencyCoefficients) -> list[list[float]]:
    """Five typical intervals as the profile predicts them, each divided by its time."""
    rows = []
    for steps, batch, context, tokens in (
        (10, 1, 200, 0),
        (10, 8, 4000, 0),
        (10, 24, 20000, 0),
        (5, 8, 2000, 500),
        (5, 4, 2000, 2000),
    ):
        squares = tokens * tokens
        seconds = (
            steps * (prior.decode_a + prior.decode_b * context + prior.decode_c * batch)
            + prior.prefill_b * tokens
            + prior.prefill_c * squares
        )
        if seconds > 0:
            rows.append(
                [
                    steps / seconds,
                    steps * context / seconds,
                    steps * batch / seconds,
                    tokens / seconds,
                    squares / seconds,
                ]
            )
    return rows
