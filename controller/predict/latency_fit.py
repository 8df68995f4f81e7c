"""Fits eq. 1 and eq. 2 to measurements: non-negative least squares on *relative* error (HyperFlexis App. A).

Each row is divided by its measured time, so that 10 % of a short step weighs as much as 10 % of a long one. The normal
equations are small and solved here, so that neither gateway nor engine needs numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from controller.core.errors import ConfigError
from controller.core.types import LatencyCoefficients

Row = tuple[float, ...]

# App. A's grid; its "284" is taken as a misprint of 384.
GRID_BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192)
GRID_LENGTHS = (4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2020)


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One prefill batch: new prompt tokens, their squares as in eq. 1, measured seconds."""

    tokens: int
    squares: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """One decode step: batch size, sum of current lengths, measured seconds."""

    batch: int
    context_sum: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients with their in-sample relative errors (0.05 = 5 %)."""

    coefficients: LatencyCoefficients
    prefill_median_error: float
    prefill_p95_error: float
    decode_median_error: float
    decode_p95_error: float
    samples: int


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float] | None:
    """Gaussian elimination with partial pivoting; None if the system is singular."""
    n = len(right)
    rows = [[*matrix[i], right[i]] for i in range(n)]
    for col in range(n):
        pivot = max(range(col, n), key=lambda r: abs(rows[r][col]))
        if abs(rows[pivot][col]) < 1e-14:
            return None
        rows[col], rows[pivot] = rows[pivot], rows[col]
        for r in range(col + 1, n):
            factor = rows[r][col] / rows[col][col]
            if factor:
                rows[r] = [x - factor * y for x, y in zip(rows[r], rows[col], strict=True)]
    result = [0.0] * n
    for i in reversed(range(n)):
        rest = sum(rows[i][j] * result[j] for j in range(i + 1, n))
        result[i] = (rows[i][n] - rest) / rows[i][i]
    return result


def solve_nonnegative(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Least squares with x >= 0 from normal equations: the most negative variable is set to 0 and the others are solved
    again.
    """
    active = list(range(len(right)))
    while active:
        scale = {i: matrix[i][i] ** 0.5 or 1.0 for i in active}
        part = [[matrix[i][j] / (scale[i] * scale[j]) for j in active] for i in active]
        found = solve(part, [right[i] / scale[i] for i in active])
        if found is None:
            active.pop()  # collinear columns: the later one adds nothing to the earlier ones
            continue
        lowest = min(range(len(active)), key=lambda k: found[k])
        if found[lowest] >= 0:
            full = [0.0] * len(right)
            for k, i in enumerate(active):
                full[i] = found[k] / scale[i]
            return full
        del active[lowest]
    return [0.0] * len(right)


def relative_least_squares(rows: Iterable[tuple[Row, float]], columns: int) -> list[float]:
    """Non-negative coefficients that minimise sum(((row . x - t) / t)^2). Measurements with t = 0 are skipped."""
    matrix = [[0.0] * columns for _ in range(columns)]
    right = [0.0] * columns
    for features, seconds in rows:
        if seconds <= 0:
            continue
        scaled = [f / seconds for f in features]
        for i in range(columns):
            right[i] += scaled[i]
            for j in range(columns):
                matrix[i][j] += scaled[i] * scaled[j]
    return solve_nonnegative(matrix, right)


def fit(prefill: Sequence[PrefillSample], decode: Sequence[DecodeSample]) -> Fit:
    """Fit both equations. Raises ConfigError if there are fewer than three samples of either."""
    for name, count in (("prefill", len(prefill)), ("decode", len(decode))):
        if count < 3:
            raise ConfigError(f"a fit needs at least three {name} samples, got {count}", field=name)
    prefill_rows = [((1.0, float(s.tokens), float(s.squares)), s.seconds) for s in prefill]
    decode_rows = [((1.0, float(s.context_sum), float(s.batch)), s.seconds) for s in decode]
    p = relative_least_squares(prefill_rows, 3)
    d = relative_least_squares(decode_rows, 3)
    prefill_median, prefill_p95 = _errors(prefill_rows, p)
    decode_median, decode_p95 = _errors(decode_rows, d)
    coefficients = LatencyCoefficients(p[0], p[1], p[2], d[0], d[1], d[2])
    samples = len(prefill) + len(decode)
    return Fit(coefficients, prefill_median, prefill_p95, decode_median, decode_p95, samples)


def _errors(rows: Sequence[tuple[Row, float]], x: Sequence[float]) -> tuple[float, float]:
    errors = sorted(abs(sum(f * c for f, c in zip(features, x, strict=True)) - t) / t for features, t in rows if t > 0)
    return errors[len(errors) // 2], errors[min(len(errors) - 1, int(len(errors) * 0.95))]
