"""The request mixes of HyperFlexis (Table 1): lengths, targets and arrivals.

Lengths are normal, truncated to [low, mean + 4 std]; sharegpt's, whose deviation exceeds the mean, are lognormal with
the same mean and deviation, bounded by the context. Each task is a Poisson process of its own at an equal share of the
rate; its gaps are exponential and never truncated (cut gaps would offer more load than asked). Prompts are random
token ids from the seed, so that no two requests share a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

FIRST_PLAIN_TOKEN = 3  # below are <s>, </s> and the first byte
VOCABULARY = 1024
Law = Literal["normal", "lognormal"]


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts. `mean` and `std` are those before truncation to [low, high]."""

    mean: float
    std: float
    low: int
    high: int
    law: Law = "normal"

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """`count` integer lengths; values outside the bounds are drawn again."""
        drawn = self._raw(rng, count)
        while (outside := (drawn < self.low) | (drawn > self.high)).any():
            drawn[outside] = self._raw(rng, int(outside.sum()))
        return np.rint(drawn).astype(int)

    def _raw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        if self.law == "normal":
            return rng.normal(self.mean, self.std, count)
        variance = math.log1p((self.std / self.mean) ** 2)
        return rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), count)


@dataclass(frozen=True, slots=True)
class Task:
    """One row of Table 1. Its name is also the name of its SLO class."""

    name: str
    ttft_s: float
    tpot_s: float
    prompt: Lengths
    output: Lengths


def _normal(mean: float, std: float, low: int) -> Lengths:
    return Lengths(mean, std, low, math.ceil(mean + 4 * std))


FOUR_TASKS = (
    Task("medical_qa", 0.7, 0.5, _normal(32.57, 10.32, 4), _normal(38.92, 16.83, 2)),
    Task("tldr_content_gen", 1.0, 0.7, _normal(44.38, 6.58, 4), _normal(96.04, 35.03, 2)),
    Task("tldr_headline_gen", 2.0, 0.9, _normal(121.82, 35.04, 8), _normal(13.59, 6.55, 2)),
    Task("wikisql", 20.0, 1.0, _normal(643.22, 337.01, 16), _normal(27.82, 4.84, 2)),
)
TWO_TASKS = (
    Task("gsm8k", 0.7, 0.2, _normal(51.44, 15.78, 4), _normal(90.13, 26.73, 2)),
    Task(
        "sharegpt",
        2.0,
        0.5,
        Lengths(259.19, 324.88, 4, 2800, "lognormal"),
        Lengths(207.79, 234.99, 2, 1200, "lognormal"),
    ),
)
MIXES: dict[str, tuple[Task, ...]] = {"4-task": FOUR_TASKS, "2-task": TWO_TASKS}


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a plan; `at` is seconds after the start of the run."""

    at: float
    task: Task
    prompt: tuple[int, ...]
    output_tokens: int

    def body(self, model: str, **extra: Any) -> dict[str, Any]:
        """OpenAI completion body with the exact prompt and output length; `extra` adds fields (slo_class, priority)."""
        return {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            **extra,
        }


def burst(tasks: Sequence[Task], rate: float, seed: int, per_task: int = 300) -> list[Arrival]:
    """The paper's load: `per_task` requests of each task; `rate` (requests/s) is that of all tasks together."""
    return _merged(tasks, rate, seed, per_task=per_task, duration_s=math.inf)


def sustained(tasks: Sequence[Task], rate: float, seed: int, duration_s: float = 90.0) -> list[Arrival]:
    """All arrivals of `duration_s` seconds."""
    return _merged(tasks, rate, seed, per_task=None, duration_s=duration_s)


def _merged(tasks: Sequence[Task], rate: float, seed: int, per_task: int | None, duration_s: float) -> list[Arrival]:
    if rate <= 0:
        raise ValueError(f"rate must be positive, not {rate}")
    share = rate / len(tasks)
    arrivals: list[Arrival] = []
    for index, task in enumerate(tasks):
        rng = np.random.default_rng([seed, index])
        arrivals += _of_task(task, _times(rng, share, per_task, duration_s), rng)
    return sorted(arrivals, key=lambda arrival: arrival.at)


def _times(rng: np.random.Generator, rate: float, count: int | None, duration_s: float) -> list[float]:
    """Renewal times with exponential gaps: `count` of them, or all within the duration."""
    times: list[float] = []
    at = rng.exponential(1 / rate)
    while at < duration_s and (count is None or len(times) < count):
        times.append(at)
        at += rng.exponential(1 / rate)
    return times


def _of_task(task: Task, times: Sequence[float], rng: np.random.Generator) -> list[Arrival]:
    prompts, outputs = task.prompt.draw(rng, len(times)), task.output.draw(rng, len(times))
    return [
        Arrival(at, task, tuple(rng.integers(FIRST_PLAIN_TOKEN, VOCABULARY, prompt).tolist()), int(output))
        for at, prompt, output in zip(times, prompts, outputs, strict=True)
    ]
