"""Deadlines of the stages of a program: rules that divide the end-to-end deadline.

"Concord: SLO-Aware Optimization and Stateful Orchestration for LLM Systems", sec. 4.1 and its alternatives in App. A.
If stages take the predicted times, all three rules give the same deadlines. They differ once a stage ends early or late
(worked example C6):

- `accumulated` (the paper's phi): the deadline times the share of all time that has passed when the stage ends. A late
  stage does not change later deadlines.
- `own_share`: the deadline times the stage's share of all time, from when the stage began. A late stage delays later
  deadlines as much; the last one is cut at the end-to-end deadline.
- `share_of_rest`: the time left times the stage's share of the time of all stages to come. A delay is spread over all
  of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from controller.core.errors import ConfigError, UnknownName

STAGE_DEADLINES = ("accumulated", "own_share", "share_of_rest")
LIVE_RULE = "share_of_rest"  # of tenants that chose none: a step after a late one still gets time


def checked_rule(rule: str) -> str:
    if rule not in STAGE_DEADLINES:
        valid = ", ".join(STAGE_DEADLINES)
        raise UnknownName(f"unknown rule {rule!r} of stage deadlines; valid: {valid}", field="stage_deadlines")
    return rule


def accumulated_shares(seconds: Sequence[float]) -> list[float]:
    """phi(s): the share of all time that has passed when stage s ends; 1 for the last one."""
    whole = math.fsum(seconds)
    if not whole > 0:
        raise ConfigError("a pattern's stages must take time", field="seconds")
    shares, so_far = [], 0.0
    for each in seconds:
        so_far += each
        shares.append(so_far / whole)
    shares[-1] = 1.0
    return shares


def stage_due(
    rule: str, seconds: Sequence[float], stage: int, arrived: float, began: float, deadline_s: float
) -> float:
    """When stage number `stage` (from 0), which begins at `began`, should end; on the clock of `arrived`.

    `seconds`: predicted time of each stage. `deadline_s`: of the whole program, after `arrived`.
    """
    end = arrived + deadline_s
    if rule == "accumulated":
        return arrived + accumulated_shares(seconds)[stage] * deadline_s
    if rule == "own_share":
        return min(end, began + seconds[stage] / math.fsum(seconds) * deadline_s)
    rest = math.fsum(seconds[stage:])
    return began + (seconds[stage] / rest if rest > 0 else 1.0) * (end - began)
