"""The pattern graphs that a gateway divides the deadlines of workflows by. Without those of a tenant, a request of a
workflow whose client says nothing of what follows counts as the last one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from api.openai.state.published import Note, PublishedFiles
from controller.predict.answer_lengths import PublishedVersion
from controller.predict.pattern_graphs import GraphSet, GraphsInForce


class GraphStore(Protocol):
    """Blocking reads of published versions."""

    def graph_versions(self) -> Sequence[PublishedVersion]: ...

    def graph_content(self, tenant: str, version: int) -> bytes | None: ...


class GraphSets(PublishedFiles[GraphSet]):
    """By tenant."""

    def __init__(
        self,
        store: GraphStore,
        take: Callable[[Mapping[str, GraphsInForce]], None],
        note: Note,
        clock: Callable[[], float] = time.time,
    ) -> None:
        def taken(found: Mapping[str, tuple[int, GraphSet]]) -> None:
            take({tenant: GraphsInForce(*each) for tenant, each in found.items()})

        super().__init__(
            "set of pattern graphs", store.graph_versions, store.graph_content, _opened, taken, note, clock
        )


def _opened(content: bytes) -> GraphSet:
    graphs = GraphSet.from_bytes(content)
    graphs.prepare()
    return graphs
