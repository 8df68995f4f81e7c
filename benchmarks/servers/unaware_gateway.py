"""A gateway that tells neither engines nor migrator of deadlines: `python -m benchmarks.servers.unaware_gateway`.

Its options are those of `python -m api.openai`, and all else is as there: the gateway itself orders its queue by
deadlines, ends what waits too long, and sends bounds, waiting times and ranks. It exists for comparisons alone: the
product has no switch for it.
"""

from __future__ import annotations

import math
import sys

from api.openai import in_flight
from api.openai.__main__ import main
from controller.core.types import Request
from controller.dispatch.disaggregation.placements import Prefilled
from workers.backends.hints import Hints, hints_of


def undated_hints(request: Request, now: float, workflow_due: float = math.inf, waits_until: float = math.inf) -> Hints:
    """As `hints_of`, without the deadlines of the request and of its workflow."""
    told = hints_of(request, now, workflow_due, waits_until)
    return told._replace(due_s=math.inf, workflow_s=math.inf, workflow="")


def undated_pace_s(stage: Prefilled, instance_id: str, now: float) -> float:
    """As of a request without a deadline."""
    return math.inf


def forget_deadlines() -> None:
    """In this process, from now on."""
    in_flight.hints_of = undated_hints
    Prefilled.deadline_pace_s = undated_pace_s  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    forget_deadlines()
    sys.exit(main())
