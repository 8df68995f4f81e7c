"""Which decode instances a prefilled request's KV can get to, and where else the request could begin anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from controller.core.types import Request, Role
from controller.dispatch.disaggregation.incompatible_peers import IncompatiblePeers
from controller.dispatch.disaggregation.link_book import LinkBook
from controller.dispatch.disaggregation.transfers import Transfer
from controller.dispatch.shadow_state import Worker, longest_context


class Reach:
    """Reads `workers` (by id), `links` and `strangers`, which are the migrator's; changes nothing. `now` in seconds."""

    def __init__(self, workers: Mapping[str, Worker], links: LinkBook, incompatible: IncompatiblePeers) -> None:
        self._workers = workers
        self._links = links
        self._incompatible = incompatible

    def decoders(self, transfer: Transfer, now: float) -> list[Worker]:
        """Of its model, of its prefill engine's kind (others do not read its KV), and with a context that is long
        enough, or nobody's is longer; without those that said its engine's KV is another model's or layout's."""
        able = self._alike(transfer.request, self._backend(transfer.source))
        incompatible = self._incompatible.of(transfer.source, now)
        return [w for w in able if w.id not in incompatible] if incompatible else able

    def among_strangers(self, transfer: Transfer, now: float) -> bool:
        """Decode instances serve, but only such as said so."""
        able = self._alike(transfer.request, self._backend(transfer.source))
        return bool(able) and self._incompatible.of(transfer.source, now).issuperset(w.id for w in able)

    def may_come(self, transfer: Transfer) -> bool:
        """Does one that could take it sleep, or start? Whatever it said is forgotten in its sleep."""
        able = self._alike(transfer.request, self._backend(transfer.source), serving=False)
        return any(not w.takes_decodes for w in able)

    def candidates(self, transfer: Transfer, decoders: Sequence[Worker]) -> list[Worker]:
        """Those of its `decoders` with KV room for the prompt; those that failed it only if there is no other."""
        tokens = transfer.request.prompt_tokens
        able = [w for w in decoders if tokens < w.free_tokens() or not w.outstanding]
        return [w for w in able if w.id not in transfer.excluded] or able

    def reached(self, transfer: Transfer, candidates: Sequence[Worker], now: float) -> list[Worker]:
        """Over links that are not down and not closed."""
        return [w for w in candidates if self._links.usable((transfer.source, w.id), now)]

    def tried(self, transfer: Transfer, candidates: Sequence[Worker], patience_s: float, now: float) -> bool:
        """Are some of them out of reach only while another transfer tries their link, for a while at most?"""
        return any(self._links.tried((transfer.source, w.id), patience_s, now) for w in candidates)

    def at_worst(self, transfer: Transfer, candidates: Sequence[Worker], patience_s: float, now: float) -> list[Worker]:
        """No link is usable, and there is no other way: those that only failed lately, or after a while any."""
        answering = [w for w in candidates if not self._links.down((transfer.source, w.id))]
        return answering or (list(candidates) if now - transfer.since >= patience_s else [])

    def other_way(self, transfer: Transfer, candidates: Sequence[Worker], now: float) -> frozenset[str] | None:
        """None of the decode instances with room is reached from where it was prefilled, or there is none at all: from
        elsewhere one may be, or somebody may take both stages. Whom to avoid then; None: there is nobody else."""
        here = frozenset({transfer.source} if candidates else ())
        if not self.elsewhere(transfer.request, here):  # asked first: dead ends take a look at every link
            return None
        return self.but_for(here, transfer.request, now)

    def but_for(self, here: frozenset[str], request: Request, now: float) -> frozenset[str] | None:
        """The same where these are to be avoided whatever way leads from them."""
        avoid = here | self.dead_ends(request, now)
        return avoid if self.elsewhere(request, avoid) else None

    def dead_ends(self, request: Request, now: float) -> frozenset[str]:
        """Prefill instances from which its KV gets to no decode instance: none is there that reads it and whose
        context will do, or no link to one is usable."""
        found = set()
        by_backend: dict[str, list[Worker]] = {}  # who could take it is asked once: fleets have many prefill instances
        for worker in self._prefillers(request.model):
            if worker.spec.role is not Role.PREFILL:
                continue
            backend, source = worker.spec.backend, worker.id
            if backend not in by_backend:
                by_backend[backend] = self._alike(request, backend)
            incompatible = self._incompatible.of(source, now)
            ways = (w.id for w in by_backend[backend] if w.id not in incompatible)
            if not any(self._links.usable((source, target), now) for target in ways):
                found.add(source)
        return frozenset(found)

    def elsewhere(self, request: Request, avoid: frozenset[str]) -> bool:
        """Could it be prefilled once more by somebody whose answer gets on? By the dispatcher's rule for contexts, or
        it would be sent back to where it comes from."""
        longest = longest_context(w for w in self._workers.values() if w.spec.model == request.model)
        others = (worker for worker in self._prefillers(request.model) if worker.id not in avoid)
        return any(worker.long_enough(request, longest) for worker in others)

    def moves(self, transfer: Transfer, workers: Sequence[Worker]) -> Mapping[str, float]:
        """Seconds that its KV is expected to take to each of them."""
        tokens = transfer.kv_tokens or transfer.request.prompt_tokens
        return self._links.moves(transfer.source, [w.id for w in workers], tokens)

    def _backend(self, source: str) -> str | None:
        worker = self._workers.get(source)
        return worker.spec.backend if worker is not None else None

    def _alike(self, request: Request, backend: str | None, *, serving: bool = True) -> list[Worker]:
        """Of any backend where its prefill engine has gone. `serving` False: those too that will once they wake."""
        able = [  # the fleet may be of many models: the cheapest question first
            w
            for w in self._workers.values()
            if w.spec.model == request.model
            and (backend is None or w.spec.backend == backend)
            and (w.takes_decodes or (not serving and w.may_take_decodes))
        ]
        lengths = [w.spec.max_model_len for w in able]
        if not able or min(lengths) >= (need := able[0].context_need(request)):
            return able
        need = min(need, max(lengths))
        return [w for w in able if w.spec.max_model_len >= need]

    def _prefillers(self, model: str) -> Iterator[Worker]:
        return (worker for worker in self._workers.values() if worker.takes and worker.spec.model == model)
