"""Stores versions of length forests. Only the trainer writes them, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypedDict

from controller.models import LengthVersion
from controller.predict.length_forest import LengthForest
from controller.services.records.learned_versions import learned_version_store


class CoverageAt(TypedDict):
    """Share of the answers longer than `tokens` that the bound covered which was asked when so many were out; None
    without any."""

    tokens: int
    answers: int
    coverage: float | None


@dataclass(frozen=True, slots=True)
class JudgedForest:
    """What `LengthVersion` says of it, with its forest. `refused`: why it must not be in force; "": it may be."""

    model: str
    forest: LengthForest
    first_at: datetime
    last_at: datetime
    answers: int
    cut_answers: int
    judged: int
    coverage: float
    coverage_by_tokens: Sequence[CoverageAt]
    class_coverage: float
    pinball: float
    class_pinball: float
    refused: str


def length_version_store(judged: JudgedForest) -> LengthVersion:
    """Publish a version, or record that it was refused. Older forests are dropped in the same transaction."""
    content = None if judged.refused else judged.forest.to_bytes()
    figures = {name: getattr(judged, name) for name in JudgedForest.__slots__ if name not in ("model", "forest")}
    return learned_version_store(LengthVersion, {"model": judged.model}, content, **figures)
