"""Requests of the simulator's mixes (HyperFlexis Table 1) with prompts, for real engines.

Lengths and arrivals come from `controller.simulator.workloads.mixes`, so a simulated run and a real one of the same
seed have the same requests. Prompts are random token ids from the seed: no two requests share a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from controller.simulator.workloads.mixes import FOUR_TASKS, MIXES, TWO_TASKS, Task, demands

__all__ = ["FOUR_TASKS", "MIXES", "TWO_TASKS", "PlannedArrival", "Task", "burst", "sustained"]

FIRST_PLAIN_TOKEN = 3  # the ids below are <s>, </s> and the first byte
VOCABULARY = 1024


@dataclass(frozen=True, slots=True)
class PlannedArrival:
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


def burst(tasks: Sequence[Task], rate: float, seed: int, per_task: int = 300) -> list[PlannedArrival]:
    """The paper's load: `per_task` requests of each task. `rate` (requests/s) is that of all tasks together."""
    return _merged(tasks, rate, seed, per_task=per_task, duration_s=math.inf)


def sustained(tasks: Sequence[Task], rate: float, seed: int, duration_s: float = 90.0) -> list[PlannedArrival]:
    """All arrivals of `duration_s` seconds."""
    return _merged(tasks, rate, seed, per_task=None, duration_s=duration_s)


def _merged(
    tasks: Sequence[Task], rate: float, seed: int, per_task: int | None, duration_s: float
) -> list[PlannedArrival]:
    by_name = {task.name: task for task in tasks}
    rng = np.random.default_rng([seed, len(tasks)])  # the tasks' own seeds are [seed, index]
    return [
        PlannedArrival(
            demand.at,
            by_name[demand.slo_class],
            tuple(rng.integers(FIRST_PLAIN_TOKEN, VOCABULARY, demand.prompt_tokens).tolist()),
            demand.output_tokens,
        )
        for demand in demands(tasks, rate, seed, per_task=per_task, duration_s=duration_s)
    ]
