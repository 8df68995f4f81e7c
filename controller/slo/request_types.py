"""The types of requests by what they ask for (Concord ch. 3): latency, deadline, compound, best effort."""

from __future__ import annotations

from enum import Enum


class RequestType(Enum):
    """`LATENCY`: targets for its first token and the pace after it. `DEADLINE`: a time for its whole answer.
    `COMPOUND`: a workflow, which counts once, however many requests it has. `BEST_EFFORT`: it named no target, no class
    and no priority, and its tenant has no default class."""

    LATENCY = "latency"
    DEADLINE = "deadline"
    COMPOUND = "compound"
    BEST_EFFORT = "best_effort"
