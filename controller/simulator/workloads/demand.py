"""What a workload asks for: the truth about each request, of which a dispatcher learns only what it would live."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from controller.core.estimates import Estimate
from controller.core.types import Request, Targets


@dataclass(frozen=True, slots=True)
class Demand:
    """One request. `at` is seconds after the start; `output_tokens` is what the model will answer.

    `max_tokens` is the bound the client sends, which a gateway may read; `prefix` are block ids of the prompt;
    `workflow` names the program that this call is part of; `estimate` is what an analyser believes of it; `may_defer`:
    served late rather than refused.
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

    def request(self, model: str, targets: Targets, expected_tokens: int, level: int | None) -> Request:
        """What a dispatcher is told of it: `expected_tokens` is a prediction, `targets` what it was promised."""
        return Request(
            id=self.id,
            arrival=self.at,
            targets=targets,
            prompt_tokens=self.prompt_tokens,
            output_tokens=expected_tokens,
            model=model,
            tenant=self.tenant,
            slo_class=self.slo_class,
            priority=self.priority,
            level=level,
            value=self.value,
            max_tokens=self.max_tokens,
            workflow=self.workflow,
            may_defer=self.may_defer,
        )
