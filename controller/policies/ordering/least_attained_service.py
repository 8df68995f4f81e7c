"""Program-level least attained service: the workflow that has received the least service goes first.

Autellix (Luo et al., "Autellix: An Efficient Serving Engine for LLM Agents as General Programs", 2025,
https://arxiv.org/abs/2502.13965), PLAS: the priority of a call is the service that all calls of its *program* have
received when it arrives. Built from its description in Concord's evaluation; the full paper and the authors' code were
not available. Service is counted in tokens (prompt and output). A request without a workflow is a program of its own.
Deviation: a call keeps its rank until it is queued again. `keep` limits the programs and open requests remembered; the
oldest are forgotten first. Cost: O(1) per decision and event.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

from controller.core import events as ev
from controller.core.errors import ConfigError
from controller.core.policy import ORDERINGS, Cost, Rank
from controller.core.types import Request


@dataclass(frozen=True, slots=True)
class Config:
    keep: int = 100_000

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ConfigError("keep must be at least 1 program", field="keep")


@ORDERINGS.register("least_attained_service")
class LeastAttainedService:
    name: ClassVar[str] = "least_attained_service"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()
        self._attained: OrderedDict[str, int] = OrderedDict()
        self._open: OrderedDict[str, tuple[str, int]] = OrderedDict()  # by request: workflow and prompt tokens

    def rank(self, request: Request, cost: Cost, now: float) -> Rank:
        return Rank((float(self._attained.get(request.workflow, 0)), request.arrival))

    def observe(self, event: ev.Event, now: float) -> None:
        if isinstance(event, ev.Arrived):
            if event.request.workflow:
                self._open[event.request.id] = (event.request.workflow, event.request.prompt_tokens)
                _bound(self._open, self.config.keep)  # refused and dropped requests never report an end
        elif isinstance(event, ev.Finished):
            workflow, prompt = self._open.pop(event.request_id, ("", 0))
            if workflow:
                self._served(workflow, prompt + event.output_tokens)
        elif isinstance(event, ev.Cancelled) or (isinstance(event, ev.Failed) and not event.before_first_token):
            self._open.pop(event.request_id, None)

    def _served(self, workflow: str, tokens: int) -> None:
        self._attained[workflow] = self._attained.get(workflow, 0) + tokens
        self._attained.move_to_end(workflow)
        _bound(self._attained, self.config.keep)


def _bound(kept: OrderedDict[str, Any], most: int) -> None:
    if len(kept) > most:
        kept.popitem(last=False)
