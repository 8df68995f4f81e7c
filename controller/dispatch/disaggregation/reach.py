"""Which decode instances the KV of a prefilled request can get to, and where else the request could be prefilled.

Three things limit that: the context an instance has, its link (dispatch.disaggregation.link_book), and whether it can
read the KV of the prefill instance at all (`IncompatiblePeers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from controller.core.types import Load, Request, Role
from controller.dispatch.disaggregation.link_book import LinkBook
from controller.dispatch.disaggregation.transfers import DecodeTransfer
from controller.dispatch.lane import longest_context
from controller.dispatch.shadow_state import ShadowInstance

NO_INSTANCE: frozenset[str] = frozenset()


class IncompatiblePeers:
    """Which decode instances reported that the KV of which prefill instance is of another model or layout
    (`other_model`). That is true of what the two engines run and not of one request, so no other request needs to find
    it out with a prefill of its own.

    A report holds until either engine begins a new run (`forget`), for `lasts_s` seconds at most, and is remembered
    until KV was read after all (`read`). When it no longer holds, one prefill at a time tries it at that source, while
    the others go elsewhere; KV that is computed already goes wherever no report holds. `under_way`: is this transfer
    still the current one of its request? That is looked up each time, so that a transfer that vanished leaves no trial
    behind.
    """

    def __init__(self, lasts_s: float, under_way: Callable[[DecodeTransfer], bool]) -> None:
        self._lasts_s = lasts_s
        self._under_way = under_way
        self._until: dict[str, dict[str, float]] = {}  # by source and target
        self._trials: dict[str, DecodeTransfer] = {}  # by source

    def __len__(self) -> int:
        """Sources with any report."""
        return len(self._until)

    def met(self, source: str, target: str, now: float) -> None:
        self._until.setdefault(source, {})[target] = now + self._lasts_s
        self._trials.pop(source, None)

    def of(self, source: str, now: float) -> frozenset[str]:
        """Decode instances that cannot read what is computed there."""
        known = self._until.get(source)
        return NO_INSTANCE if known is None else frozenset(target for target, until in known.items() if now < until)

    def doubted(self, source: str, targets: Iterable[str]) -> bool:
        """Whether each of these was reported, even if the report no longer holds."""
        known = self._until.get(source)
        return known is not None and all(target in known for target in targets)

    def tried(self, source: str) -> bool:
        """Whether a transfer is under way that finds out if a report is still true."""
        holder = self._trials.get(source)
        return holder is not None and holder.source == source and self._under_way(holder)

    def tries(self, transfer: DecodeTransfer) -> None:
        self._trials[transfer.source] = transfer

    def read(self, source: str, target: str, now: float) -> None:
        """The target read KV of the source. While a report holds nothing is sent there: this is of an earlier run."""
        known = self._until.get(source)
        if known is not None and now >= known.get(target, now):
            self._drop(source, target)

    def forget(self, instance_id: str) -> None:
        """It is gone or begins a new run, maybe with another model."""
        if not self._until:
            return
        self._until.pop(instance_id, None)
        self._trials.pop(instance_id, None)
        for source in list(self._until):
            self._drop(source, instance_id)

    def _drop(self, source: str, target: str) -> None:
        known = self._until[source]
        known.pop(target, None)
        if not known:
            del self._until[source]
            self._trials.pop(source, None)


def begins_new_run(load: Load, before: Load | None) -> bool:
    """It sleeps, and may wake with other weights; or its count of tokens fell, so it was started again between two
    reads."""
    if not load.awake:
        return True
    return before is not None and load.generation_tokens_total < before.generation_tokens_total


class Reach:
    """Reads the migrator's `instances` (by id), `links` and `incompatible`; changes nothing. `now` in seconds."""

    def __init__(
        self, instances: Mapping[str, ShadowInstance], links: LinkBook, incompatible: IncompatiblePeers
    ) -> None:
        self._instances = instances
        self._links = links
        self._incompatible = incompatible

    def decoders(self, transfer: DecodeTransfer, now: float) -> list[ShadowInstance]:
        """Decode instances of its model and of its prefill engine's kind (others cannot read its KV) whose context is
        long enough, or the longest there is; without incompatible peers."""
        able = self._alike(transfer.request, self._backend(transfer.source))
        incompatible = self._incompatible.of(transfer.source, now)
        return [each for each in able if each.id not in incompatible] if incompatible else able

    def only_incompatible(self, transfer: DecodeTransfer, now: float) -> bool:
        """Whether decode instances serve but all of them are incompatible with its source."""
        able = self._alike(transfer.request, self._backend(transfer.source))
        return bool(able) and self._incompatible.of(transfer.source, now).issuperset(each.id for each in able)

    def may_come(self, transfer: DecodeTransfer) -> bool:
        """Whether one that could take it sleeps or starts. A sleeping one may wake with a model that reads its KV."""
        able = self._alike(transfer.request, self._backend(transfer.source), serving=False)
        return any(not each.takes_decodes for each in able)

    def candidates(self, transfer: DecodeTransfer, decoders: Sequence[ShadowInstance]) -> list[ShadowInstance]:
        """Those of `decoders` with KV room for the prompt; those that failed it only if there is no other."""
        tokens = transfer.request.prompt_tokens
        able = [each for each in decoders if tokens < each.free_tokens() or not each.outstanding]
        return [each for each in able if each.id not in transfer.excluded] or able

    def reached(
        self, transfer: DecodeTransfer, candidates: Sequence[ShadowInstance], now: float
    ) -> list[ShadowInstance]:
        """Those over whose link KV can move: not down and not closed."""
        return [each for each in candidates if self._links.usable((transfer.source, each.id), now)]

    def tried(
        self, transfer: DecodeTransfer, candidates: Sequence[ShadowInstance], patience_s: float, now: float
    ) -> bool:
        """Whether a link to one of them is closed only while a transfer tries it, for at most `patience_s`."""
        return any(self._links.tried((transfer.source, each.id), patience_s, now) for each in candidates)

    def at_worst(
        self, transfer: DecodeTransfer, candidates: Sequence[ShadowInstance], patience_s: float, now: float
    ) -> list[ShadowInstance]:
        """With no usable link and no other way: those whose link is not down, or after `patience_s` any."""
        answering = [each for each in candidates if not self._links.down((transfer.source, each.id))]
        return answering or (list(candidates) if now - transfer.since >= patience_s else [])

    def other_way(
        self, transfer: DecodeTransfer, candidates: Sequence[ShadowInstance], now: float
    ) -> frozenset[str] | None:
        """No decode instance with room is reached from where it was prefilled, or there is none at all. From another
        prefill instance one may be reached, or a collocated one may take both stages: returns the instances to avoid
        then, None if no other is left."""
        here = frozenset({transfer.source} if candidates else ())
        if not self.elsewhere(transfer.request, here):  # first, because finding dead ends looks at every link
            return None
        return self.but_for(here, transfer.request, now)

    def but_for(self, here: frozenset[str], request: Request, now: float) -> frozenset[str] | None:
        """The same, where the instances of `here` are to be avoided whatever their links."""
        avoid = here | self.dead_ends(request, now)
        return avoid if self.elsewhere(request, avoid) else None

    def dead_ends(self, request: Request, now: float) -> frozenset[str]:
        """Prefill instances from which its KV gets to no decode instance: none is compatible and has the context, or no
        link to such a one is usable."""
        found = set()
        by_backend: dict[str, list[ShadowInstance]] = {}  # found once each: fleets have many prefill instances
        for instance in self._prefillers(request.model):
            if instance.spec.role is not Role.PREFILL:
                continue
            backend, source = instance.spec.backend, instance.id
            if backend not in by_backend:
                by_backend[backend] = self._alike(request, backend)
            incompatible = self._incompatible.of(source, now)
            ways = (each.id for each in by_backend[backend] if each.id not in incompatible)
            if not any(self._links.usable((source, target), now) for target in ways):
                found.add(source)
        return frozenset(found)

    def elsewhere(self, request: Request, avoid: frozenset[str]) -> bool:
        """Whether an instance that is not in `avoid` could prefill it again. By the dispatcher's rule for contexts, or
        the dispatcher would send it back to where it comes from."""
        longest = longest_context(each for each in self._instances.values() if each.spec.model == request.model)
        others = (instance for instance in self._prefillers(request.model) if instance.id not in avoid)
        return any(instance.long_enough(request, longest) for instance in others)

    def moves(self, transfer: DecodeTransfer, instances: Sequence[ShadowInstance]) -> Mapping[str, float]:
        """Seconds its KV is expected to take to each of them."""
        tokens = transfer.kv_tokens or transfer.request.prompt_tokens
        return self._links.moves(transfer.source, [each.id for each in instances], tokens)

    def _backend(self, source: str) -> str | None:
        instance = self._instances.get(source)
        return instance.spec.backend if instance is not None else None

    def _alike(self, request: Request, backend: str | None, *, serving: bool = True) -> list[ShadowInstance]:
        """Decode instances of its model and `backend`; of any backend (None) once its prefill engine is gone.

        `serving` False: also those that will serve once they wake.
        """
        able = [  # fleets may serve many models: the cheapest test first
            each
            for each in self._instances.values()
            if each.spec.model == request.model
            and (backend is None or each.spec.backend == backend)
            and (each.takes_decodes or (not serving and each.may_take_decodes))
        ]
        lengths = [each.spec.max_model_len for each in able]
        if not able or min(lengths) >= (need := able[0].context_need(request)):
            return able
        need = min(need, max(lengths))
        return [each for each in able if each.spec.max_model_len >= need]

    def _prefillers(self, model: str) -> Iterator[ShadowInstance]:
        return (instance for instance in self._instances.values() if instance.takes and instance.spec.model == model)
