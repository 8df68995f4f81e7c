"""Servers that an operator launches with the weights of one that serves, from the command to the first served request.

Slackline starts none of them: it says with what command, keeps that as a Decision under the name that the new server
shall have, and when an instance of that name is registered watches for its first token, counted from the command.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.utils import timezone

from controller.models import Action, Decision, Instance
from controller.services.actions import action_order
from controller.services.actors import Actor
from controller.services.decisions import decision_record
from controller.services.instances import instance_register

LAUNCH = "engine_launch"  # kind of the Decision
JOINS_WITHIN = timedelta(hours=1)  # an instance of the name that comes later is another one


def launch_record(
    *, actor: Actor, instance_id: str, seed: str, command: str, inputs: Mapping[str, Any], rejected: Mapping[str, str]
) -> Decision:
    """`seed`: the instance whose memory gives the weights; `rejected`: why other seeds could not, by id."""
    return decision_record(
        actor=actor,
        kind=LAUNCH,
        subject_type="instance",
        subject=instance_id,
        reason="seeded",
        inputs={"seed": seed, **inputs},
        outcome={"command": command},
        rejected=rejected,
    )


def instance_join(*, actor: Actor, id: str, **fields: Any) -> Instance:
    """`instance_register`, and the watch for its first served request where a command to launch it was given lately."""
    with transaction.atomic():
        row = instance_register(actor=actor, id=id, **fields)
        since = timezone.now() - JOINS_WITHIN
        told = Decision.objects.filter(kind=LAUNCH, subject_type="instance", subject=id, at__gte=since)
        launch = told.order_by("-at", "-id").first()
        if launch is not None:
            known = {"decision": launch.pk, "at": launch.at.isoformat(), "seed": launch.inputs["seed"]}
            action_order(actor, row, Action.Kind.FIRST_SERVED, {"launch": known})
    return row
