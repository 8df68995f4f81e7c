"""Experiments as a worker handles them: claim one with a lease, report progress, store each run, end it.

Every write names the token of the lease and changes nothing if another worker (or none) holds the experiment, so a
worker that was presumed dead does no harm when it returns. A finished run is stored at once and not run again.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from controller.models import Experiment, ExperimentRun

LEASE = timedelta(seconds=20)  # renewed twice a second; after kill -9 another worker continues this much later
ATTEMPTS_MAX = 5  # for an experiment whose worker died each time, most likely out of memory
STEP_LENGTH = 200


class LeaseLost(Exception):
    """The experiment was cancelled, removed or taken over, so the worker that held the lease stops."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A claimed experiment. `spent_s`: wall seconds of earlier attempts."""

    experiment_id: int
    token: str
    spent_s: float

    def rows(self) -> Any:
        return Experiment.objects.filter(pk=self.experiment_id, lease_token=self.token, state=Experiment.State.RUNNING)


def experiment_claim(*, previews_only: bool = False) -> tuple[Experiment, Lease] | None:
    """The next experiment: previews first, then oldest first, including one whose lease has expired. None: there is
    nothing to run."""
    now = timezone.now()
    due = Q(state=Experiment.State.QUEUED) | Q(state=Experiment.State.RUNNING, lease_until__lt=now)
    with transaction.atomic():
        rows = Experiment.objects.select_for_update(skip_locked=True).filter(due)
        if previews_only:
            rows = rows.filter(kind=Experiment.Kind.PREVIEW)
        row = rows.order_by("-kind", "created_at", "id").first()  # "preview" sorts after "experiment"
        if row is None:
            return None
        row.state, row.attempts = Experiment.State.RUNNING, row.attempts + 1
        row.lease_token, row.lease_until = secrets.token_hex(16), now + LEASE
        row.started_at = row.started_at or now
        fields = ["state", "attempts", "lease_token", "lease_until", "started_at", "updated_at"]
        if row.attempts > ATTEMPTS_MAX:
            row.state, row.ended_at, row.lease_token = Experiment.State.FAILED, now, ""
            row.error = f"The worker failed {ATTEMPTS_MAX} times. Try fewer requests."
            row.save(update_fields=[*fields, "ended_at", "error"])
            return None
        row.save(update_fields=fields)
    return row, Lease(row.pk, row.lease_token, row.spent_s)


def experiment_progress(*, lease: Lease, progress: float, step: str, spent_s: float) -> None:
    """Renews the lease. Raises LeaseLost."""
    told = lease.rows().update(
        progress=min(1.0, max(0.0, progress)),
        step=step[:STEP_LENGTH],
        lease_until=timezone.now() + LEASE,
        spent_s=lease.spent_s + spent_s,
    )
    if not told:
        raise LeaseLost


def runs_plan(*, lease: Lease, labels: Sequence[str], rates: Sequence[float | None], seeds: Sequence[int],
              knee: float | None, notes: Sequence[str] = ()) -> None:  # fmt: skip
    """Plan every run, once. Runs of one rate and seed are adjacent, so that what is compared ends together."""
    with transaction.atomic():
        if not lease.rows().select_for_update().exists():
            raise LeaseLost
        places = [(rate, seed, variant) for rate in rates for seed in seeds for variant in range(len(labels))]
        ExperimentRun.objects.bulk_create(
            ExperimentRun(
                experiment_id=lease.experiment_id,
                number=number,
                variant=variant,
                label=labels[variant],
                rate=rate,
                seed=seed,
            )
            for number, (rate, seed, variant) in enumerate(places)
        )
        lease.rows().update(knee=knee)
        if notes:
            lease.rows().update(notes=list(notes))


def run_finish(*, lease: Lease, run: ExperimentRun, report: Mapping[str, Any], seconds: float) -> None:
    with transaction.atomic():
        if not lease.rows().select_for_update().exists():
            raise LeaseLost
        ExperimentRun.objects.filter(pk=run.pk).update(report=dict(report), seconds=seconds)


def experiment_finish(
    *, lease: Lease, result: Mapping[str, Any], spent_s: float, notes: Sequence[str] | None = None
) -> None:
    """End the experiment. `notes` None: the notes of the plan stay."""
    said = {} if notes is None else {"notes": list(notes)}
    _end(lease, Experiment.State.DONE, spent_s, result=dict(result), progress=1.0, step="", **said)


def experiment_fail(*, lease: Lease, error: str, field: str = "", spent_s: float = 0.0) -> None:
    _end(lease, Experiment.State.FAILED, spent_s, error=error[:2000], error_field=field[:120])


def _end(lease: Lease, state: str, spent_s: float, **fields: Any) -> None:
    told = lease.rows().update(
        state=state,
        ended_at=timezone.now(),
        updated_at=timezone.now(),
        lease_token="",
        lease_until=None,
        spent_s=lease.spent_s + spent_s,
        **fields,
    )
    if not told:
        raise LeaseLost
