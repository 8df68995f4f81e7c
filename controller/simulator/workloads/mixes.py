"""Request mixes of the papers: lengths and targets by task, and their arrivals.

HyperFlexis Table 1: lengths are normal, truncated to [low, mean + 4 std]. Those of sharegpt, whose deviation exceeds
the mean, are lognormal with the same mean and deviation, bounded by the context. Each task is an independent process
with an equal share of the rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from controller.core.errors import ConfigError, UnknownName
from controller.core.types import Targets
from controller.simulator.workloads.arrivals import Lengths, renewal_times
from controller.simulator.workloads.demand import Demand

PREFIX_BLOCK = 16  # tokens, an engine's block_size where nothing else is set
PATIENT_S = 3600.0  # no waiting time, so that no policy can drop requests


@dataclass(frozen=True, slots=True)
class Task:
    """One kind of request; its name is also that of its SLO class. `share`: part of the rate.

    Requests have the task's position in its mix as their priority (0 the first and highest), which a mapping reads.
    `model`: that the requests ask for, "" the first instance's. `shared_prefix`: tokens at the beginning of their
    prompts that all of them share, in whole blocks of PREFIX_BLOCK tokens.
    """

    name: str
    targets: Targets
    prompt: Lengths
    output: Lengths
    share: float = 1.0
    model: str = ""
    shared_prefix: int = 0


def _task(name: str, ttft_s: float, tpot_s: float, prompt: Lengths, output: Lengths, share: float = 1.0) -> Task:
    return Task(name, Targets(ttft_s, tpot_s, None, PATIENT_S), prompt, output, share)


def _normal(mean: float, std: float, low: int) -> Lengths:
    return Lengths(mean, std, low, math.ceil(mean + 4 * std))


FOUR_TASKS = (
    _task("medical_qa", 0.7, 0.5, _normal(32.57, 10.32, 4), _normal(38.92, 16.83, 2)),
    _task("tldr_content_gen", 1.0, 0.7, _normal(44.38, 6.58, 4), _normal(96.04, 35.03, 2)),
    _task("tldr_headline_gen", 2.0, 0.9, _normal(121.82, 35.04, 8), _normal(13.59, 6.55, 2)),
    _task("wikisql", 20.0, 1.0, _normal(643.22, 337.01, 16), _normal(27.82, 4.84, 2)),
)
TWO_TASKS = (
    _task("gsm8k", 0.7, 0.2, _normal(51.44, 15.78, 4), _normal(90.13, 26.73, 2)),
    _task(
        "sharegpt",
        2.0,
        0.5,
        Lengths(259.19, 324.88, 4, 2800, "lognormal"),
        Lengths(207.79, 234.99, 2, 1200, "lognormal"),
    ),
)
MIXES: dict[str, tuple[Task, ...]] = {"4-task": FOUR_TASKS, "2-task": TWO_TASKS}


def mix(name: str) -> tuple[Task, ...]:
    try:
        return MIXES[name]
    except KeyError:
        raise UnknownName(f"unknown mix {name!r}; valid: {', '.join(sorted(MIXES))}", field="mix") from None


def demands(
    tasks: Sequence[Task],
    rate: float,
    seed: int,
    *,
    per_task: int | None = None,
    duration_s: float = math.inf,
    cv: float = 1.0,
    stagger_s: float = 0.0,
) -> list[Demand]:
    """`per_task` requests of each task, or all of `duration_s`. `rate` (requests/s) is that of all tasks together.

    With `stagger_s` the last task starts at once and each one before it that much later, and all run to the end
    (HyperFlexis sec. 9.1: 15 to 60 requests/s, the loosest first). Every task has a generator seeded with (seed,
    index): the same seed gives the same requests whatever the policy, and more requests of one task do not change
    another.
    """
    whole = sum(task.share for task in tasks)
    if not tasks or not whole > 0:
        raise ConfigError("a mix needs tasks with positive shares", field="tasks")
    found: list[Demand] = []
    for index, task in enumerate(tasks):
        rng = np.random.default_rng([seed, index])
        start = stagger_s * (len(tasks) - 1 - index)
        times = renewal_times(rng, rate * task.share / whole, count=per_task, until_s=duration_s - start, cv=cv)
        found += of_task(task, [start + at for at in times], rng, priority=index)
    return sorted(found, key=lambda demand: (demand.at, demand.id))


def of_task(task: Task, times: Sequence[float], rng: np.random.Generator, priority: int = 0) -> list[Demand]:
    """Requests of one task at given times. The client gives the output length as `max_tokens`."""
    prompts, outputs = task.prompt.draw(rng, len(times)), task.output.draw(rng, len(times))
    prefix = tuple(f"{task.name}/{block}" for block in range(task.shared_prefix // PREFIX_BLOCK))
    return [
        Demand(
            f"{task.name}-{number}",
            at,
            int(prompt),
            int(output),
            task.targets,
            task.name,
            priority=priority,
            max_tokens=int(output),
            prefix=prefix[: int(prompt) // PREFIX_BLOCK],
            model=task.model,
        )
        for number, (at, prompt, output) in enumerate(zip(times, prompts, outputs, strict=True))
    ]
