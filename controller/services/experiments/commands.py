"""Experiments as people handle them: create, name, keep, cancel and remove. Every step is audited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from controller.models import Experiment
from controller.services import change
from controller.services.actors import Actor
from controller.services.decisions import decision_record
from controller.services.experiments.specs import ReadProfile, resolved, run_count
from controller.services.experiments.traces import slug_of

EDITABLE = ("name", "kept")
OPEN_MAX = 50  # queued and running, so that a script in a loop does not fill the queue for days
KEPT_FOR = timedelta(days=30)  # experiments that are not marked as kept
PREVIEW_KEPT_FOR = timedelta(hours=1)


def experiment_create(*, actor: Actor, name: str, spec: Any, read_profile: ReadProfile) -> Experiment:
    """Add a queued experiment. Raises ConfigError with the path of an invalid value in the spec, ValidationError for
    anything else."""
    given = name or (spec.get("name") if isinstance(spec, Mapping) else "") or "Experiment"
    if not isinstance(given, str) or len(given) > 120 or "\x00" in given:
        raise ValidationError({"name": "Must be at most 120 characters."})
    if Experiment.objects.filter(state__in=Experiment.OPEN, kind=Experiment.Kind.EXPERIMENT).count() >= OPEN_MAX:
        raise ValidationError(
            f"{OPEN_MAX} experiments are already queued or running. Cancel one or wait until one ends."
        )
    ready, notes = resolved(spec, read_profile)
    ready["name"] = given
    row = Experiment(slug=slug_of(given), name=given, spec=ready, notes=notes, created_by=actor.name)
    with transaction.atomic():
        row.save(force_insert=True)
        _audit(actor, "created", row, {"compares": row.labels, "runs": run_count(ready), "seeds": row.seeds})
    return row


def preview_create(*, actor: Actor, name: str, spec: Mapping[str, Any], notes: Sequence[str]) -> Experiment:
    """Simulate an unsaved edit. Nothing is decided yet, so nothing is audited. A person has one preview at a time."""
    with transaction.atomic():
        older = Experiment.objects.filter(
            kind=Experiment.Kind.PREVIEW, created_by=actor.name, state__in=Experiment.OPEN
        )
        older.update(state=Experiment.State.CANCELLED, ended_at=timezone.now(), lease_token="")
        row = Experiment(
            slug=slug_of("preview"),
            name=name[:120],
            kind=Experiment.Kind.PREVIEW,
            spec=dict(spec),
            notes=list(notes),
            created_by=actor.name,
        )
        row.save(force_insert=True)
    return row


def experiment_update(
    *, actor: Actor, experiment_id: int, version: int | None, changes: Mapping[str, Any]
) -> Experiment:
    """Change its name, and whether it is kept. Raises DoesNotExist, VersionConflict, ValidationError."""
    return change.update(
        Experiment,
        experiment_id,
        actor=actor,
        kind="experiment",
        version=version,
        changes=changes,
        editable=EDITABLE,
        gateways=False,
    )


def experiment_cancel(*, actor: Actor, slug: str) -> Experiment:
    """Its worker notices when it next reports progress. Finished runs stay. Raises DoesNotExist, ValidationError."""
    with transaction.atomic():
        row = Experiment.objects.select_for_update().get(slug=slug)
        if row.state not in Experiment.OPEN:
            raise ValidationError(f"The experiment has already ended ({row.state}).")
        row.state, row.ended_at, row.lease_token = Experiment.State.CANCELLED, timezone.now(), ""
        row.save(update_fields=["state", "ended_at", "lease_token", "updated_at"])
        if row.kind == Experiment.Kind.EXPERIMENT:
            _audit(actor, "cancelled", row, {"progress": row.progress})
    return row


def experiment_remove(*, actor: Actor, slug: str) -> None:
    """Delete the experiment and its runs; a worker that runs it stops. Raises DoesNotExist."""
    with transaction.atomic():
        row = Experiment.objects.select_for_update().get(slug=slug)
        _audit(actor, "removed", row, {"name": row.name, "state": row.state})
        row.delete()


def experiments_retain(*, actor: Actor) -> int:
    """Delete experiments that ended long ago and were not kept; returns their number."""
    now = timezone.now()
    ended = Experiment.objects.exclude(state__in=Experiment.OPEN)
    previews = ended.filter(kind=Experiment.Kind.PREVIEW, ended_at__lt=now - PREVIEW_KEPT_FOR)
    previews.delete()
    old = ended.filter(kind=Experiment.Kind.EXPERIMENT, kept=False, ended_at__lt=now - KEPT_FOR)
    slugs = list(old.values_list("slug", flat=True)[:500])
    for slug in slugs:
        experiment_remove(actor=actor, slug=slug)
    return len(slugs)


def _audit(actor: Actor, what: str, row: Experiment, inputs: Mapping[str, Any]) -> None:
    decision_record(
        actor=actor,
        kind=f"experiment_{what}",
        subject_type="experiment",
        subject=row.slug,
        reason=f"{actor.type}_{'asked' if what == 'cancelled' else what}",
        inputs=inputs,
        outcome={"id": row.pk, "state": row.state},
    )
