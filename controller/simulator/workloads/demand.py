"""One request of a workload with its true lengths. A dispatcher learns only what it would in production."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

from controller.core.estimates import Estimate
from controller.core.types import Request, Targets


@dataclass(frozen=True, slots=True)
class Demand:
    """One request.

    `at`: seconds after the start. `output_tokens`: true length of the answer. `max_tokens`: bound given by the client,
    which a gateway may read. `prefix`: block ids of the prompt. `workflow`: the program that this call belongs to.
    `workflow_left_s`: until that program is due; None: it has no deadline of its own. `model`: the served model that it
    asks for, that of the first instance where it is empty. `estimate`: what a predictor says about it.
    `may_defer`: served late instead of refused. `bounds`: lower and upper bound of the answer, which the dispatcher is
    told together with the length in their geometric middle, the median of a lognormal error; None: it is told neither.
    """

    id: str
    at: float
    prompt_tokens: int
    output_tokens: int
    targets: Targets
    slo_class: str = ""
    tenant: str = "default"
    priority: int = 0
    value: float = 1.0
    max_tokens: int | None = None
    prefix: tuple[Hashable, ...] = ()
    workflow: str = ""
    estimate: Estimate | None = None
    may_defer: bool = False
    model: str = ""
    workflow_left_s: float | None = None
    bounds: tuple[int, int] | None = None

    def request(self, model: str, targets: Targets, expected_tokens: int, level: int | None) -> Request:
        """The request as the dispatcher gets it. `expected_tokens`: predicted length, where there are no bounds.
        `targets`: those that apply."""
        least, most = self.bounds or (None, None)
        if least is not None and most is not None:
            expected_tokens = max(1, round(math.sqrt(least * most)))
        return Request(
            id=self.id,
            arrival=self.at,
            targets=targets,
            prompt_tokens=self.prompt_tokens,
            output_tokens=expected_tokens,
            least_tokens=least,
            most_tokens=most,
            model=model,
            tenant=self.tenant,
            slo_class=self.slo_class,
            priority=self.priority,
            level=level,
            value=self.value,
            max_tokens=self.max_tokens,
            workflow=self.workflow,
            workflow_left_s=self.workflow_left_s,
            may_defer=self.may_defer,
        )
