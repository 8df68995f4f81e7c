"""Corrects the step times of a profile by the records of served requests, also by noisy records.

`latency_records.fit_records` uses the records alone and needs clean ones. On a machine that pauses, tokens arrive in
bunches. Dividing by measured times then gives the shortest intervals the highest weight. Long intervals, whatever made
them long, contain more prompts of other requests, so the fit explains every pause by prompt tokens and nothing by
steps. Here a profile gives the shape, and the records correct only as much of it as they can support:

- One factor for all coefficients, so that the fit explains the total time. An interval is weighted by its *expected*
  time, because the variance of a sum of steps grows with their number. The influence of an interval with a pause is
  bounded (Huber's loss).
- Five factors (step constant, context, batch, prompt tokens, their squares), held to the common factor by a ridge whose
  strength follows the scatter (residual variance over DEVIATION squared). They are used only if they leave no more
  scatter than CLEAN and at most HALF of what one factor leaves, so if the profile has the wrong shape and the machine
  is quiet enough to show it. None falls below LEAST of the common factor. A column that the profile lacks first gets
  FLOOR of the total time, because a token and a sequence cost something. Only the quadratic term may be absent.

Cost: rows x rounds x 25.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from controller.core.errors import ConfigError
from controller.core.types import LatencyCoefficients
from controller.predict.latency_fit import Row, solve_nonnegative
from controller.predict.latency_records import COLUMNS, LEAST_INTERVALS

ROUNDS = 20
HUBER = 3.0  # standard deviations beyond which the influence of an interval is bounded
DEVIATION = 0.3  # expected between the factors, as a share of the common factor
LEAST = 0.1
FLOOR = 0.01
CLEAN, HALF = 0.1, 0.5  # largest median relative error of five factors: absolute, and as a share of that of one factor
TO_SIGMA = 1.4826  # median absolute deviation of a normal distribution
SQUARES = 4


def refit_profile(rows: Sequence[tuple[Row, float]], profile: LatencyCoefficients) -> LatencyCoefficients:
    """The corrected profile. `rows`: from `latency_records.intervals`, of one engine or several alike.

    The constant of a prefill alone keeps its ratio to that of a decode step. Raises ConfigError if there are too few
    rows, or the profile takes no time.
    """
    rows = [(row, seconds) for row, seconds in rows if seconds > 0]
    if len(rows) < LEAST_INTERVALS:
        raise ConfigError(
            f"a refit needs at least {LEAST_INTERVALS} decoded requests, got {len(rows)}", field="records"
        )
    shape = _shape(rows, profile)
    parts = [([value * k for value, k in zip(row, shape, strict=True)], seconds) for row, seconds in rows]
    common = factors = [_level(parts)] * COLUMNS
    for _ in range(ROUNDS):
        common = [_weighed(parts, common)[2]] * COLUMNS
        factors = _improved(parts, factors)
    if _error(parts, factors) > min(CLEAN, HALF * _error(parts, common)):
        factors = common
    a, context, batch, linear, quadratic = (k * factor for k, factor in zip(shape, factors, strict=True))
    prefill_a = profile.prefill_a * factors[0] if profile.prefill_a > 0 else a
    return LatencyCoefficients(prefill_a, linear, quadratic, a, context, batch)


def _shape(rows: Sequence[tuple[Row, float]], profile: LatencyCoefficients) -> list[float]:
    """The profile by column; columns that it lacks are filled."""
    given = [profile.decode_a, profile.decode_b, profile.decode_c, profile.prefill_b, profile.prefill_c]
    sums = [sum(row[column] for row, _ in rows) for column in range(COLUMNS)]
    expected = sum(k * total for k, total in zip(given, sums, strict=True))
    if expected <= 0 or min(given) < 0:
        raise ConfigError("the profile must give steps a time", field="profile")
    return [
        k if column == SQUARES or total <= 0 else max(k, FLOOR * expected / total)
        for column, (k, total) in enumerate(zip(given, sums, strict=True))
    ]


def _level(parts: Sequence[tuple[Sequence[float], float]]) -> float:
    return sum(seconds for _, seconds in parts) / sum(sum(part) for part, _ in parts)


def _expected(parts: Sequence[tuple[Sequence[float], float]], factors: Sequence[float]) -> list[float]:
    return [sum(x * k for x, k in zip(part, factors, strict=True)) for part, _ in parts]


def _error(parts: Sequence[tuple[Sequence[float], float]], factors: Sequence[float]) -> float:
    """Median error, as a share of the expected time."""
    expected = _expected(parts, factors)
    return statistics.median(abs(seconds / e - 1) for (_, seconds), e in zip(parts, expected, strict=True))


def _weighed(
    parts: Sequence[tuple[Sequence[float], float]], factors: Sequence[float]
) -> tuple[list[float], float, float]:
    """Huber's weights around a fit, the standard deviation per second of work, and the common factor."""
    expected = _expected(parts, factors)
    scatter = [abs(seconds - e) / e**0.5 for (_, seconds), e in zip(parts, expected, strict=True)]
    sigma = max(TO_SIGMA * statistics.median(scatter), 1e-9)
    say = [min(1.0, HUBER * sigma / max(z, 1e-12)) for z in scatter]
    level = sum(w * seconds for w, (_, seconds) in zip(say, parts, strict=True)) / sum(
        w * sum(part) for w, (part, _) in zip(say, parts, strict=True)
    )
    return [w / e for w, e in zip(say, expected, strict=True)], sigma, level


def _improved(parts: Sequence[tuple[Sequence[float], float]], factors: Sequence[float]) -> list[float]:
    """One round of iteratively reweighted least squares, with x - LEAST x level >= 0 in place of x >= 0."""
    weights, sigma, level = _weighed(parts, factors)
    ridge, least = (sigma / (DEVIATION * level)) ** 2, LEAST * level
    matrix = [[ridge if i == j else 0.0 for j in range(COLUMNS)] for i in range(COLUMNS)]
    right = [ridge * (level - least)] * COLUMNS
    for weight, (part, seconds) in zip(weights, parts, strict=True):
        rest = seconds - least * sum(part)
        for i, x in enumerate(part):
            right[i] += weight * x * rest
            for j, y in enumerate(part):
                matrix[i][j] += weight * x * y
    return [least + found for found in solve_nonnegative(matrix, right)]
