"""Versions of length forests: which are in force, and all of them for the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from controller.models import LengthVersion, RequestRecord, ServedModel
from controller.predict.answer_lengths import FEATURES, PublishedVersion
from controller.selectors.records.learned_versions import content_of, newest_in_force, newest_rows, published

SHOWN = 10  # versions of a model, beside the newest that passed
RECENT = 2_000  # requests


def published_versions() -> list[PublishedVersion]:
    """The newest of each model that has content."""
    return published(LengthVersion, "model")


def published_content(model: str, version: int) -> bytes | None:
    """None: it has none any more."""
    return content_of(LengthVersion, model=model, version=version)


@dataclass(frozen=True, slots=True)
class ModelVersions:
    """The newest versions of a model, newest first. `in_force` is one of them; None: lengths are predicted by the mean
    of their kind. `recent`: how many of the newest requests that `in_force` bounded ended by themselves, and how many
    of these its upper bound covered."""

    model: str
    versions: Sequence[LengthVersion]
    in_force: LengthVersion | None
    recent: tuple[int, int] = (0, 0)

    @property
    def recent_coverage(self) -> float | None:
        answers, covered = self.recent
        return covered / answers if answers else None

    @property
    def by_tokens(self) -> list[LengthVersion]:
        """The versions that were judged by tokens produced."""
        return [row for row in self.versions if row.coverage_by_tokens]

    @property
    def too_old(self) -> bool:
        """Whether there would be one in force if it were younger."""
        return self.in_force is None and any(not row.refused for row in self.versions)


def model_versions(now: datetime) -> list[ModelVersions]:
    """Of every served model, by name."""
    names = ServedModel.objects.order_by("name").values_list("name", flat=True)
    by_model: dict[str, list[LengthVersion]] = {}
    for row in newest_rows(LengthVersion.objects.filter(model__in=names), "model", SHOWN):
        by_model.setdefault(row.model, []).append(row)
    hits = _recent_hits()
    return [_of_model(name, by_model.get(name, []), hits, now) for name in names]


def _of_model(
    name: str, versions: Sequence[LengthVersion], hits: Mapping[tuple[str, int], tuple[int, int]], now: datetime
) -> ModelVersions:
    newest = newest_in_force(versions, now)
    if newest is None:
        return ModelVersions(name, versions, None)
    return ModelVersions(name, versions, newest, hits.get((name, newest.version), (0, 0)))


def _recent_hits() -> dict[tuple[str, int], tuple[int, int]]:
    """By model and version: answers among the newest RECENT requests that were not cut, and how many were covered."""
    newest = RequestRecord.objects.order_by("-arrived_at", "-id")
    rows = newest.values_list("model", "length_version", "length_bounds", "output_tokens", "outcome", "length_features")
    found: dict[tuple[str, int], tuple[int, int]] = {}
    most = FEATURES.index("max_tokens")
    for model, version, bounds, tokens, outcome, features in rows[:RECENT]:
        if version is None or outcome != "ok" or len(bounds) != 2 or len(features) != len(FEATURES):
            continue
        if features[most] and tokens >= features[most]:
            continue
        answers, covered = found.get((model, version), (0, 0))
        found[model, version] = (answers + 1, covered + (tokens <= bounds[1]))
    return found
