"""Which decode instances a prefilled request's KV can get to, and where else the request could begin anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from controller.core.types import Role
from controller.dispatch.links import LinkBook
from controller.dispatch.shadow import Worker
from controller.dispatch.transfers import Transfer


class Reach:
    """Reads `workers` (by id) and `links`, which are the migrator's; changes nothing. `now` is in seconds."""

    def __init__(self, workers: Mapping[str, Worker], links: LinkBook) -> None:
        self._workers = workers
        self._links = links

    def decoders(self, transfer: Transfer) -> list[Worker]:
        """Of its model, of its prefill engine's kind (others do not read its KV), and with a context that is long
        enough, or nobody's is longer."""
        request = transfer.request
        able = self._decoders(request.model, self._workers.get(transfer.source))
        longest = max((w.spec.max_model_len for w in able), default=0)
        return [w for w in able if w.holds(request) or w.spec.max_model_len == longest]

    def candidates(self, transfer: Transfer) -> list[Worker]:
        """Decode instances of its model with KV room for the prompt; those that failed it only if there is no other."""
        request = transfer.request
        able = [w for w in self.decoders(transfer) if request.prompt_tokens < w.free_tokens() or not w.outstanding]
        return [w for w in able if w.id not in transfer.excluded] or able

    def reached(self, transfer: Transfer, candidates: Sequence[Worker], now: float) -> list[Worker]:
        """Over links that are not down and not closed."""
        return [w for w in candidates if self._links.usable((transfer.source, w.id), now)]

    def at_worst(self, transfer: Transfer, candidates: list[Worker], patience_s: float, now: float) -> list[Worker]:
        """No link is usable, and there is no other way: those that only failed lately, or after a while any."""
        answering = [w for w in candidates if not self._links.down((transfer.source, w.id))]
        return answering or (candidates if now - transfer.since >= patience_s else [])

    def dead_ends(self, model: str, now: float) -> frozenset[str]:
        """Prefill instances from which KV gets to no decode instance: none is there, or no link to one is usable."""
        return frozenset(
            worker.id
            for worker in self._prefillers(model)
            if worker.spec.role is Role.PREFILL
            and not any(self._links.usable((worker.id, w.id), now) for w in self._decoders(model, worker))
        )

    def elsewhere(self, model: str, avoid: frozenset[str]) -> bool:
        """Could it be prefilled once more by somebody whose answer gets on?"""
        return any(worker.id not in avoid for worker in self._prefillers(model))

    def moves(self, transfer: Transfer, workers: Sequence[Worker]) -> Mapping[str, float]:
        """Seconds that its KV is expected to take to each of them."""
        tokens = transfer.kv_tokens or transfer.request.prompt_tokens
        return self._links.moves(transfer.source, [w.id for w in workers], tokens)

    def _decoders(self, model: str, source: Worker | None) -> list[Worker]:
        able = [w for w in self._workers.values() if w.takes_decodes and w.spec.model == model]
        return able if source is None else [w for w in able if w.spec.backend == source.spec.backend]

    def _prefillers(self, model: str) -> Iterator[Worker]:
        return (worker for worker in self._workers.values() if worker.takes and worker.spec.model == model)
