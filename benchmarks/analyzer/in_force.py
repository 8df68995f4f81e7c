"""A length forest and pattern graphs put in force as the Celery tasks publish them, made of traffic that is made up:
for figures of what they cost, which say nothing of how well they tell.

Reads JSON (`model`, `tenant`, `forest`: whether one is published too) from standard input. It runs in a process of its
own (`Stack.manage`), so that load generators need no Django.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np

from controller.predict.pattern_graphs import Call, kind_of

ANSWERS = 2_000
WORKFLOWS = 200
LEVELS = (2, 3, 4, 6, 8)  # of one call each, in turn
SEED = 0


def made_up_workflow(model: str, index: int, began: float, rng: np.random.Generator) -> list[Call]:
    """Seconds of epoch. Calls follow one another with a pause."""
    calls, at = [], began
    for number in range(1, LEVELS[index % len(LEVELS)] + 1):
        took, tokens = float(rng.uniform(0.01, 0.3)), int(rng.integers(4, 120))
        calls.append(Call(kind_of(model, ""), at, at + took, 64, tokens, number))
        at += took + float(rng.uniform(0.1, 0.5))
    return calls


def put_forest_in_force(model: str) -> None:
    """Needs Django. Of 2,000 answers of 1 to 400 tokens."""
    from controller.predict.answer_lengths import FEATURES
    from controller.services.records.length_versions import length_version_store
    from workers.analysis import length_versions

    rng, now = np.random.default_rng(SEED), datetime.now(UTC)
    answers = [
        length_versions.RecordedAnswer(
            now - timedelta(seconds=ANSWERS - index),
            "interactive",
            [float(each) for each in rng.uniform(0, 500, len(FEATURES))],
            int(rng.integers(1, 400)),
            True,
        )
        for index in range(ANSWERS)
    ]
    length_version_store(replace(length_versions.judge(model, answers), refused=""))


def put_graphs_in_force(model: str, tenant: str) -> None:
    """Needs Django. Of 200 workflows."""
    from controller.services.records.graph_versions import graph_version_store
    from workers.analysis import graph_versions

    rng, now = np.random.default_rng(SEED), datetime.now(UTC)
    began = now.timestamp() - 3_600
    made = [made_up_workflow(model, index, began + index, rng) for index in range(WORKFLOWS)]
    workflows = [graph_versions.FinishedWorkflow(calls, calls[-1].ended or began) for calls in made]
    judged = graph_versions.judge(tenant, workflows, now.timestamp())
    if judged is None:
        raise RuntimeError("no pattern graphs of made-up workflows")
    graph_version_store(replace(judged, refused=""))


def main() -> int:
    import django

    django.setup()
    asked = json.load(sys.stdin)
    if asked["forest"]:
        put_forest_in_force(asked["model"])
    put_graphs_in_force(asked["model"], asked["tenant"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
