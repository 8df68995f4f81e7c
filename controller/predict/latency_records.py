"""Latency coefficients from the records of served requests alone, without a profiler or engine log.

While one request decodes from its first to its last token, the engine runs one step for each of its output tokens, and
the work of these steps adds up (`controller/predict/latency.py` does the same from progress events):

    elapsed = steps x (a' + b' x mean context + c' x mean batch) + b x prefilled tokens + c x their squares

Which requests decoded at the same time, and whose prompts ended then, follows from first and last token times. The fit
is relative least squares over all requests. It is repeated without requests that differ from the last fit by more than
`outlier`, since a preempted sequence makes no progress while the others run. A full batch never shows the time of
prefill alone, so its constant is set to that of a decode step (mixed steps pay the larger constant once).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from controller.core.errors import ConfigError
from controller.core.types import LatencyCoefficients
from controller.predict.latency_fit import Row, relative_least_squares

ROUNDS = 4
OUTLIER = 0.06  # as a share of the elapsed time
COLUMNS = 5
LEAST_INTERVALS = 10
MOST_ERROR = 0.25  # median error; above it the fit only explains the rows that were left in


class Served(NamedTuple):
    """One request on one engine: tokens, and the times of its first and last output token (seconds, on any one
    clock).
    """

    prompt_tokens: int
    output_tokens: int
    first_at: float
    last_at: float


def intervals(calibration: Sequence[Served], everyone: Sequence[Served]) -> list[tuple[Row, float]]:
    """A row and its elapsed seconds for each request of `calibration` with two tokens or more.

    `everyone`: all requests that the same engine served meanwhile, including these. Cost: calibration x everyone.
    """
    return [
        (_row(each, everyone), each.last_at - each.first_at)
        for each in calibration
        if each.output_tokens > 1 and each.last_at > each.first_at
    ]


def _row(of: Served, everyone: Sequence[Served]) -> Row:
    steps, elapsed = of.output_tokens - 1, of.last_at - of.first_at
    batch = context = 0.0
    tokens = squares = 0
    for other in everyone:
        begin, end = max(of.first_at, other.first_at), min(of.last_at, other.last_at)
        if end > begin:
            share, middle = (end - begin) / elapsed, (begin + end) / 2
            grown = (middle - other.first_at) / (other.last_at - other.first_at) * other.output_tokens
            batch += share
            context += share * (other.prompt_tokens + grown)
        if of.first_at < other.first_at <= of.last_at:
            tokens += other.prompt_tokens
            squares += other.prompt_tokens**2
    return (float(steps), steps * context, steps * batch, float(tokens), float(squares))


def fit_records(rows: Sequence[tuple[Row, float]], outlier: float = OUTLIER) -> LatencyCoefficients:
    """Fit coefficients. Raises ConfigError if there are too few rows, or they give a step no time or contradict one
    another.

    Such records can still correct a profile (`latency_refit`).
    """
    if len(rows) < LEAST_INTERVALS:
        raise ConfigError(f"a fit needs at least {LEAST_INTERVALS} decoded requests, got {len(rows)}", field="records")
    used = list(rows)
    found = relative_least_squares(used, COLUMNS)
    for _ in range(ROUNDS):
        kept = [(row, seconds) for row, seconds in rows if abs(_predicted(row, found) - seconds) <= outlier * seconds]
        if len(kept) < LEAST_INTERVALS or kept == used:
            break
        used, found = kept, relative_least_squares(kept, COLUMNS)
    a, context, batch, linear, quadratic = found
    if a + batch <= 0 or a + linear <= 0:
        raise ConfigError("the records leave a step no time: they cover one load only", field="records")
    typical = statistics.median(abs(_predicted(row, found) - seconds) / seconds for row, seconds in rows)
    if typical > MOST_ERROR:
        raise ConfigError(f"the records contradict one another by {typical:.0%}: refit a profile", field="records")
    return LatencyCoefficients(a, linear, quadratic, a, context, batch)


def _predicted(row: Row, found: Sequence[float]) -> float:
    return sum(x * k for x, k in zip(row, found, strict=True))
