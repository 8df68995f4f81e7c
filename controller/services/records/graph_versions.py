"""Stores versions of pattern graphs. Only the trainer writes them, one at a time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from controller.models import GraphVersion
from controller.predict.pattern_graphs import GraphSet
from controller.services.records.learned_versions import learned_version_store


@dataclass(frozen=True, slots=True)
class JudgedGraphs:
    """What `GraphVersion` says of them, with the graphs. `refused`: why they must not be in force; "": they may be."""

    tenant: str
    found: GraphSet
    first_at: datetime
    last_at: datetime
    workflows: int
    judged: int
    matched: float
    error: float
    even_error: float
    refused: str


def graph_version_store(judged: JudgedGraphs) -> GraphVersion:
    """Publish a version, or record that it was refused. Older graphs are dropped in the same transaction."""
    content = None if judged.refused else judged.found.to_bytes()
    figures = {name: getattr(judged, name) for name in JudgedGraphs.__slots__ if name not in ("tenant", "found")}
    return learned_version_store(GraphVersion, {"tenant": judged.tenant}, content, graphs=len(judged.found), **figures)
