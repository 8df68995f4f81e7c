"""Servers that an operator launches with the weights of a serving engine, from the command to the first served request.

Slackline does not start them. It shows the command and records it as a Decision under the name of the new server. When
an instance of that name is registered, it watches for the first token and measures from the command.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.utils import timezone

from controller.models import Action, Decision, Instance
from controller.services.actors import Actor
from controller.services.decisions import decision_record
from controller.services.fleet.actions import action_order
from controller.services.fleet.instances import instance_register

LAUNCH = "engine_launch"  # kind of the Decision
JOINS_WITHIN = timedelta(hours=1)  # an instance of that name that is registered later is another one


def launch_record(
    *, actor: Actor, instance_id: str, seed: str, command: str, inputs: Mapping[str, Any], rejected: Mapping[str, str]
) -> Decision:
    """`seed`: the instance whose memory gives the weights; `rejected`: why others cannot, by id."""
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
    """`instance_register`, and a watch for its first served request if a command to launch it was shown lately."""
    with transaction.atomic():
        row = instance_register(actor=actor, id=id, **fields)
        since = timezone.now() - JOINS_WITHIN
        told = Decision.objects.filter(kind=LAUNCH, subject_type="instance", subject=id, at__gte=since)
        launch = told.order_by("-at", "-id").first()
        if launch is not None:
            known = {"decision": launch.pk, "at": launch.at.isoformat(), "seed": launch.inputs["seed"]}
            action_order(actor, row, Action.Kind.FIRST_SERVED, {"launch": known})
    return row
