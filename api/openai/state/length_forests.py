"""The forests that a gateway asks for the lengths of answers. A model without one that can be used is predicted by the
mean of its kind of traffic."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from api.openai.state.published import Note, PublishedFiles
from controller.core.errors import ConfigError
from controller.predict.answer_lengths import FEATURES, LengthsInForce, PublishedVersion
from controller.predict.length_forest import LengthForest


class ForestStore(Protocol):
    """Blocking reads of published versions."""

    def length_versions(self) -> Sequence[PublishedVersion]: ...

    def length_content(self, model: str, version: int) -> bytes | None: ...


class LengthForests(PublishedFiles[LengthForest]):
    """By model."""

    def __init__(
        self,
        store: ForestStore,
        take: Callable[[Mapping[str, LengthsInForce]], None],
        note: Note,
        clock: Callable[[], float] = time.time,
    ) -> None:
        def taken(found: Mapping[str, tuple[int, LengthForest]]) -> None:
            take({model: LengthsInForce(*each) for model, each in found.items()})

        super().__init__("length forest", store.length_versions, store.length_content, _opened, taken, note, clock)


def _opened(content: bytes) -> LengthForest:
    forest = LengthForest.from_bytes(content)
    if forest.names != FEATURES:
        raise ConfigError("it is of another release: it needs other features")
    forest.prepare()
    return forest
