"""When no other instance is put in the place of one that failed: its settings are refused, or none ever became ready.

A replacement is started with the same settings. What an engine refuses once it refuses again, so without an end there
would be a new row each minute under a new id, and nobody could stop them all.
"""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

from django.utils import timezone

from controller.core.process_spec import SAYABLE, values_refused
from controller.models import Decision, Instance
from controller.scale.lifecycle import Replace

REFUSED_TRIES = 3  # a folder that is just being mounted is refused too
START_TRIES = 8  # with their pauses two minutes and more
BESIDE = timedelta(seconds=30)  # a replacement's row and the decision for it are of one transaction


class GivenUp(NamedTuple):
    """`error`: what its row says."""

    reason: str
    error: str


def never_ready_in_a_row(row: Instance) -> int:
    """How many have failed one in the place of the other without ever having been ready, this one with them."""
    if row.ready_at is not None:
        return 0
    around = (row.created_at - BESIDE, row.created_at + BESIDE)
    made = Decision.objects.filter(kind="instance_replaced", at__range=around, outcome__replacement=row.pk).first()
    return 1 + (made.inputs.get("never_ready", 0) if made is not None else 0)


def given_up(row: Instance, step: Replace, never_ready: int) -> GivenUp | None:
    """None: another shall be put in its place."""
    told = {name: value for name, value in row.spec.items() if name in SAYABLE and name != "start_after"}
    if row.provisioner == "process" and (wrong := values_refused(told, timezone.now().timestamp(), row.max_num_seqs)):
        name, why = next(iter(wrong.items()))
        return GivenUp("settings_refused", f"{Instance.SETTINGS_REFUSED}: spec.{name} {why}")
    if step.refused and never_ready >= REFUSED_TRIES:
        return GivenUp("settings_refused", f"{Instance.SETTINGS_REFUSED} by the engine: {step.refused}")
    if never_ready >= START_TRIES:
        return GivenUp("never_ready", f"given up: {never_ready} in a row never became ready, the last: {step.error}")
    return None
