"""Waiting decode stages that no room would help: what one pass found out about one of them goes for all of its kind.

A pass looks at a bounded number of requests of a model that find no place. Those that wait for an instance
or a link, not for room, must not use that number up: behind them may be somebody whose decode instance is idle. One of
each kind is looked at, the others are passed over, which costs little however many there are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from controller.core.types import Request
from controller.dispatch.disaggregation.transfers import Transfer
from controller.dispatch.shadow_state import Worker

# Two of one kind have the same instances and links before them, if not the same room: source, model, a pair or not, and
# which contexts of the model's instances hold the prompt, and prompt and answer. Which of them failed it makes no
# difference: who has only such left waits for room as well.
Kind = tuple[str, str, bool, tuple[int, int]]
ALIKE = (0, 0)  # where all contexts are of one length


class Stuck:
    """Of one pass, during which no instance changes. Seconds since a transfer began to wait."""

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self.competing: set[str] = set()  # models of which some wait for an instance that others may take
        self._workers = workers
        self._found: dict[Kind, tuple[float, bool, bool]] = {}
        self._contexts: dict[str, list[int]] = {}  # of each model's instances, sorted

    def add(self, transfer: Transfer, for_s: float, *, competes: bool) -> None:
        """Its kind is passed over from now on; who has waited for `for_s` is looked at for itself, and where nobody
        competes, which ends in giving up, who has waited for as long as it may."""
        self._found[self._kind(transfer)] = (for_s, competes, transfer.strange)
        if competes:
            self.competing.add(transfer.request.model)

    def passes_over(self, transfer: Transfer, now: float) -> bool:
        """What was found out goes for it too. Not where its instance is chosen already."""
        if not self._found or transfer.target:
            return False
        found = self._found.get(self._kind(transfer))
        if found is None:
            return False
        for_s, competes, strange = found
        if now - transfer.since >= (for_s if competes else min(for_s, transfer.request.targets.waiting_time_s)):
            return False
        transfer.strange = strange
        return True

    def _kind(self, transfer: Transfer) -> Kind:
        request = transfer.stage.request
        model = request.model
        lengths = self._contexts.get(model)
        if lengths is None:
            lengths = self._contexts[model] = self._lengths(model)
        contexts = _held_by(lengths, request) if len(lengths) > 1 else ALIKE
        return transfer.source, model, transfer.paired, contexts

    def _lengths(self, model: str) -> list[int]:
        return sorted({worker.spec.max_model_len for worker in self._workers.values() if worker.spec.model == model})


def _held_by(lengths: list[int], request: Request) -> tuple[int, int]:
    tokens = request.prompt_tokens
    return bisect_left(lengths, tokens + 1), bisect_left(lengths, tokens + (request.max_tokens or 1))
