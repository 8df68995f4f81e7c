"""What a gateway tells an engine's scheduler of a request beyond its targets, and what the scheduler makes of it: the
same in the reference engine and in the vLLM plug-in."""

from __future__ import annotations

import math
from typing import NamedTuple

from controller.core.estimates import Estimate, ToldBounds
from controller.core.steps import Seq

LONGEST_S = 86_400.0  # a day
MOST_TOKENS = 1 << 31
LONGEST_NAME = 128  # characters of a workflow's name, or a tenant's


class ToldHints(NamedTuple):
    """Seconds from when the request came, negative if they have passed; infinite: not limited. `bounds`: lower and
    upper, in tokens. `waiting_s`: it ends if it has not begun by then. `tenant`: the same for all requests of one
    tenant; "": not known."""

    due_s: float = math.inf
    workflow_s: float = math.inf
    bounds: tuple[int, int] | None = None
    workflow: str = ""
    waiting_s: float = math.inf
    tenant: str = ""

    @property
    def dated(self) -> bool:
        return math.isfinite(min(self.due_s, self.workflow_s))


NO_HINTS = ToldHints()


def estimate_of(told: ToldHints, seq: Seq, now: float) -> Estimate | None:
    """For the policies that read one; None if nothing was told. `now`: when the request came, on the engine's clock.

    A request with a deadline earns all of its tokens or none; one of a workflow is lost only when its workflow is,
    and earns with the workflow's other open calls. One without a deadline earns each token that is on time. Bounds
    that are not known are 1 and `max_tokens`.
    """
    if told.bounds is None and not told.dated:
        return None
    lower, upper = told.bounds or (1, seq.max_tokens)
    length = ToldBounds(min(lower, seq.max_tokens), min(upper, seq.max_tokens))
    if not told.dated:
        end = seq.due if length.most < 2 else seq.due + (length.most - 1) * seq.tpot_s
        return Estimate(length, seq.value, each_token=True, due=seq.due, latest=end, likely_latest=end)
    latest = told.workflow_s if math.isfinite(told.workflow_s) else told.due_s
    due = min(told.due_s, latest)
    expected = math.sqrt(max(1, length.least) * length.most)
    worth = seq.value * (seq.prompt_tokens + expected)
    due, latest = now + due, now + latest
    return Estimate(
        length, worth, due=due, latest=latest, likely_latest=due, program=told.workflow, adds=bool(told.workflow)
    )
