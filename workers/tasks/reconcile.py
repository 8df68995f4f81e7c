"""The reconciler: compares desired and observed states, records what it saw, then acts through the provisioners. It
runs once a second.

Each step is a small transaction that compares again under the row's lock, and a provisioner is called after the step is
stored. So two runs at the same time do no harm, and the next run does what a killed worker left undone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from celery import shared_task
from celery.exceptions import SoftTimeLimitExceeded
from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import Error

from controller.core.errors import ConfigError
from controller.models import Instance
from controller.scale.lifecycle import (
    CallStart,
    CallStop,
    FoundAwake,
    Mark,
    Replace,
    Seen,
    Step,
    StopWanted,
    Wanted,
    converge,
)
from controller.scale.observation import fresh, outstanding
from controller.scale.provisioning import Hosts, abilities
from controller.services.fleet import lifecycle
from controller.services.fleet.provisioners import clusters_keep, provisioner_looked
from workers.actions.instance_links import join
from workers.live import announce
from workers.provisioners import Observation, Observed, Observer, Provisioner, sources
from workers.tasks.names import RECONCILE
from workers.tasks.scaling import fleet_or_nothing

log = logging.getLogger(__name__)
OBSERVER = Observer()  # kept between runs: a provisioner that hangs is not asked again until its call has ended


@shared_task(name=RECONCILE, soft_time_limit=7, time_limit=9)
def reconcile() -> None:
    reconcile_once(provisioners(Path(settings.DATA_DIR)), time.time(), OBSERVER)


def provisioners(data_dir: Path) -> dict[str, Provisioner]:
    """The provisioners that work on this machine, by source."""
    return sources(data_dir)


class Taken(NamedTuple):
    """A step, and the provisioner whose instance it is about."""

    by: str
    step: Step


def reconcile_once(by_name: Mapping[str, Provisioner], now: float, looks: Observer | None = None) -> list[Step]:
    """Reconcile all instances once; returns the steps taken. `now`: epoch seconds.

    A provisioner that could not be seen is left alone: nothing of it is started, stopped or replaced.
    """
    found = (looks or Observer()).at(by_name)
    for name, look in found.items():
        count, hosts = None if look.seen is None else len(look.seen), _hosts(by_name[name])
        provisioner_looked(name=name, instances=count, error=look.error, hosts=hosts)
    clusters_keep(sources=found.keys())
    fleet = fresh(fleet_or_nothing(), now)
    wanted = lifecycle.wanted_instances(outstanding(fleet) if fleet else None)
    steps = [each for name in sorted({*found, *wanted}) for each in _steps(name, wanted.get(name, []), found, now)]
    # Before the steps are taken, of which one tells gateways of the start: storing when it began tells nobody.
    told = {each.id: each.steps for look in found.values() for each in look.seen or () if each.steps}
    if told:
        lifecycle.start_steps_seen(seen=told)
    for by, step in steps:
        try:
            take(step, by, by_name)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # the other instances must not wait for this one, whatever the error is
            log.exception("instance %s: %s failed", step.id, type(step).__name__)
            _store_error(step, error)
    lifecycle.instances_seen(ids=_running(each for look in found.values() for each in look.seen or ()))
    return [step for _, step in steps]


def _hosts(provisioner: Provisioner) -> list[dict[str, Any]] | None:
    """Of its cluster, for pages; None: it has none, or cannot tell."""
    told = getattr(provisioner, "hosts", None)
    return [asdict(host) for host in told()] or None if told is not None else None


def _steps(name: str, wanted: list[Wanted], found: Mapping[str, Observation], now: float) -> list[Taken]:
    """Steps of the instances of one provisioner. One that is not on this machine has nothing that could be seen."""
    look = found.get(name, Observation(() if abilities(name).hosts != Hosts.CLUSTER else None))
    if look.seen is None:
        return []
    seen = {observed.id: _seen(observed) for observed in look.seen}
    return [Taken(name, step) for step in converge(wanted, seen, now, settings.DRAIN_TIMEOUT_S)]


def _store_error(step: Step, error: Exception) -> None:
    """Store the error on the instance's row, for the operator. An error of the database cannot be stored, and every
    page shows it."""
    if isinstance(error, Error):
        return
    message = " ".join(error.messages) if isinstance(error, ValidationError) else str(error)
    ours = isinstance(error, ConfigError | ValidationError)
    lifecycle.instance_error_set(instance_id=step.id, error=message if ours else f"{type(error).__name__}: {message}")


def take(step: Step, by: str, by_name: Mapping[str, Provisioner]) -> None:
    """`by`: the name of the provisioner whose instance it is about."""
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
            _provisioner(by_name, by).start(id, lifecycle.instance_start(instance_id=id))
        case CallStop(id, grace_s):
            _provisioner(by_name, by).stop(id, grace_s)


def _join(step: Mark) -> None:
    """Make its links before gateways see the instance, and so before its first request."""
    row = Instance.objects.select_related("model").get(pk=step.id)
    if row.observed_state != Instance.Observed.READY:
        join(row, step.url)


def _provisioner(by_name: Mapping[str, Provisioner], name: str) -> Provisioner:
    if name not in by_name:
        raise ConfigError(f"provisioner {name!r} is not available here; available: {', '.join(sorted(by_name))}")
    return by_name[name]


def _seen(observed: Observed) -> Seen:
    fields = (observed.url, observed.started_at, observed.exit_code, observed.error, observed.awake)
    return Seen(observed.state, *fields)


def _running(observed: Iterable[Observed]) -> list[str]:
    """Ids of instances whose process was seen running."""
    return [
        o.id
        for o in observed
        if o.state in ("ready", "unhealthy", "stopping") or (o.state == "starting" and o.started_at)
    ]
