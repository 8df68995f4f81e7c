"""The reconciler: compares desired and observed states, records what it saw, then acts through the provisioners. It
runs once a second.

Each step is a small transaction that compares again under the row's lock, and a provisioner is called after the step is
stored. So two runs at the same time do no harm, and the next run does what a killed worker left undone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path

from celery import shared_task
from celery.exceptions import SoftTimeLimitExceeded
from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import Error

from controller.core.errors import ConfigError
from controller.models import Instance
from controller.models.fleet import Weights
from controller.scale.lifecycle import CallStart, CallStop, FoundAwake, Mark, Replace, Seen, Step, StopWanted, converge
from controller.scale.observation import fresh, outstanding
from controller.services.fleet import lifecycle
from workers.actions.instance_keys import key_of
from workers.actions.instance_links import join
from workers.live import announce
from workers.provisioners import Endpoint, Observed, ProcessProvisioner, Provisioner, StaticProvisioner, Watch
from workers.tasks.names import RECONCILE
from workers.tasks.scaling import fleet_or_nothing

log = logging.getLogger(__name__)
WATCH = Watch()  # kept between runs: an endpoint that hangs is not asked again until its call has ended


@shared_task(name=RECONCILE, soft_time_limit=7, time_limit=9)
def reconcile() -> None:
    reconcile_once(provisioners(Path(settings.DATA_DIR)), time.time())


def provisioners(data_dir: Path) -> dict[str, Provisioner]:
    """The provisioners that work on this machine, by name. `process` needs the folder of a supervisor; `static` gets
    the registered endpoints from the database."""
    found: dict[str, Provisioner] = {"static": StaticProvisioner(_endpoints(), WATCH)}
    folder = data_dir / "engines"
    if folder.is_dir():
        found["process"] = ProcessProvisioner(folder)
    return found


def _endpoints() -> dict[str, Endpoint]:
    """The registered endpoints. Their role is compared with the engine's only when they join, since it may be switching
    later; a sleeping one is asked whether it still sleeps."""
    rows = Instance.objects.live().filter(provisioner="static").exclude(url="")
    return {row.pk: _endpoint(row) for row in rows}


def _endpoint(row: Instance) -> Endpoint:
    asleep = row.version if row.weights == Weights.ASLEEP else None
    if row.observed_state == Instance.Observed.READY:
        return Endpoint(row.url, row.backend, asleep=asleep, key=key_of(row))
    return Endpoint(row.url, row.backend, row.role, row.kv_role, asleep, key_of(row))


def reconcile_once(by_name: dict[str, Provisioner], now: float) -> list[Step]:
    """Reconcile all instances once; returns the steps taken. `now`: epoch seconds."""
    seen = {observed.id: observed for provisioner in by_name.values() for observed in provisioner.observe()}
    fleet = fresh(fleet_or_nothing(), now)
    wanted = lifecycle.wanted_instances(outstanding(fleet) if fleet else None)
    steps = converge(wanted, {id: _seen(observed) for id, observed in seen.items()}, now, settings.DRAIN_TIMEOUT_S)
    for step in steps:
        try:
            take(step, by_name)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # the other instances must not wait for this one, whatever the error is
            log.exception("instance %s: %s failed", step.id, type(step).__name__)
            _store_error(step, error)
    lifecycle.instances_seen(ids=_running(seen.values()))
    return steps


def _store_error(step: Step, error: Exception) -> None:
    """Store the error on the instance's row, for the operator. An error of the database cannot be stored, and every
    page shows it."""
    if isinstance(error, Error):
        return
    message = " ".join(error.messages) if isinstance(error, ValidationError) else str(error)
    ours = isinstance(error, ConfigError | ValidationError)
    lifecycle.instance_error_set(instance_id=step.id, error=message if ours else f"{type(error).__name__}: {message}")


def take(step: Step, by_name: dict[str, Provisioner]) -> None:
    match step:
        case Mark():
            if step.state == Instance.Observed.READY and settings.FLEET_TOKEN:
                _join(step)
            for decision in lifecycle.instance_mark(step=step):
                announce(decision)
        case FoundAwake():
            announce(lifecycle.instance_found_awake(step=step))
        case Replace():
            announce(lifecycle.instance_replace(step=step))
        case StopWanted():
            announce(lifecycle.instance_end_drain(step=step))
        case CallStart(id):
            name, spec = lifecycle.instance_start(instance_id=id)
            _provisioner(by_name, name).start(id, spec)
        case CallStop(id, grace_s):
            of_row = Instance.objects.filter(pk=id).values_list("provisioner", flat=True).first()
            _provisioner(by_name, of_row or "process").stop(id, grace_s)


def _join(step: Mark) -> None:
    """Make its links before gateways see the instance, and so before its first request."""
    row = Instance.objects.select_related("model").get(pk=step.id)
    if row.observed_state != Instance.Observed.READY:
        join(row, step.url)


def _provisioner(by_name: dict[str, Provisioner], name: str) -> Provisioner:
    if name not in by_name:
        raise ConfigError(f"provisioner {name!r} is not available here; available: {', '.join(sorted(by_name))}")
    return by_name[name]


def _seen(observed: Observed) -> Seen:
    fields = (observed.url, observed.started_at, observed.exit_code, observed.error, observed.awake)
    return Seen(observed.state, *fields)


def _running(observed: Iterable[Observed]) -> list[str]:
    """Ids of instances whose process was seen running."""
    return [o.id for o in observed if o.state in ("ready", "stopping") or (o.state == "starting" and o.started_at)]
