"""What a gateway tells the engine's scheduler of a request beyond its targets: time left, bounds of its answer, its
workflow and its tenant (`workers.backends.hints` sends it). All of it is optional, and a request of whose times and
length nothing is told has no Estimate."""

from __future__ import annotations

import math

from controller.core.told_hints import LONGEST_NAME, LONGEST_S, MOST_TOKENS, ToldHints
from workers.engine import fields
from workers.engine.errors import HttpError


def parse_hints(body: fields.Body) -> ToldHints:
    """Raises HttpError naming the field."""
    workflow, tenant = _name(body, "workflow"), _name(body, "tenant")
    return ToldHints(
        fields.number(body, "due_in", math.inf, -LONGEST_S, LONGEST_S),
        fields.number(body, "workflow_due_in", math.inf, -LONGEST_S, LONGEST_S),
        _bounds(body),
        workflow,
        fields.number(body, "waiting_in", math.inf, -LONGEST_S, LONGEST_S),
        tenant,
    )


def _name(body: fields.Body, field: str) -> str:
    found = fields.string(body, field)
    if len(found) > LONGEST_NAME:
        raise HttpError(f"{field} may have at most {LONGEST_NAME} characters", field)
    return found


def _bounds(body: fields.Body) -> tuple[int, int] | None:
    lower = fields.integer(body, "length_lower", low=0, high=MOST_TOKENS)
    upper = fields.integer(body, "length_upper", low=1, high=MOST_TOKENS)
    if lower is None and upper is None:
        return None
    if lower is None or upper is None:
        missing = "length_lower" if lower is None else "length_upper"
        raise HttpError("length_lower and length_upper must be given together", missing)
    if lower > upper:
        raise HttpError(f"length_lower must be at most length_upper={upper}, got {lower}", "length_lower")
    return lower, upper
