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
from controller.scale.provisioning import abilities
from controller.services.actors import Actor
from controller.services.decisions import decision_record
from controller.services.fleet.actions import action_order
from controller.services.fleet.instances import EDITABLE, instance_create, instance_register, instance_update
from controller.services.fleet.launch_templates import facts_of
from controller.services.replace import ExpectedVersion, FixedField, defaults_of, put

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


FIXED = ("model", "backend", "provisioner", "template", "url", "role")
FIXED_MESSAGE = "Never changes; it is {stored}. Remove the instance or choose another id."
ROLE_MESSAGE = "It is {stored}. Change it with set-role."


def instance_put(
    *, actor: Actor, instance_id: str, values: Mapping[str, Any], expected: ExpectedVersion
) -> tuple[Instance, bool]:
    """Create the instance or replace its values; whether it was created. Absent values get their default; the desired
    state and the role stay. Raises FixedField for a value that never changes, or if the instance is stopped."""

    kept = () if values.get("template") is None else ("key_name",)  # that of its template
    absent = defaults_of(Instance, values, EDITABLE, kept=kept)
    if "max_num_seqs" in absent and abilities(values["provisioner"]).registers:
        absent["max_num_seqs"] = None

    def create() -> Instance:
        fields = dict(values)
        if abilities(fields["provisioner"]).registers:
            del fields["provisioner"]
            return instance_join(actor=actor, id=instance_id, **fields)
        return instance_create(actor=actor, id=instance_id, **fields)

    def change_to(row: Instance) -> Instance:
        _refuse_fixed(row, {"template": None, **values})
        changes = {**absent, **{name: value for name, value in values.items() if name not in FIXED}}
        if row.template is not None:
            changes["spec"] = {**facts_of(row.template), **changes["spec"]}
        now = {**{name: getattr(row, name) for name in changes}, "max_num_seqs": row.configured_seqs}
        changes = {name: value for name, value in changes.items() if now[name] != value}
        if not changes:
            return row
        return instance_update(actor=actor, instance_id=row.pk, version=row.version, changes=changes)

    return put(Instance, {"pk": instance_id}, expected=expected, absent=absent, create=create, change=change_to)


def _refuse_fixed(row: Instance, values: Mapping[str, Any]) -> None:
    if row.desired_state == Instance.Desired.STOPPED:
        told = f"{row} is stopped and cannot be started again. Remove it or choose another id."
        raise FixedField({"desired_state": told})
    stored = {name: getattr(row, name) for name in FIXED if name in values}
    wanted = {**values, "url": str(values.get("url", "")).rstrip("/")}
    refused = {
        name: (ROLE_MESSAGE if name == "role" else FIXED_MESSAGE).format(stored=value)
        for name, value in stored.items()
        if value != wanted[name]
    }
    if refused:
        raise FixedField(refused)


def instance_join(*, actor: Actor, id: str, **fields: Any) -> Instance:
    """`instance_register`, and a watch for its first served request if a command to launch it was shown recently."""
    with transaction.atomic():
        row = instance_register(actor=actor, id=id, **fields)
        since = timezone.now() - JOINS_WITHIN
        told = Decision.objects.filter(kind=LAUNCH, subject_type="instance", subject=id, at__gte=since)
        launch = told.order_by("-at", "-id").first()
        if launch is not None:
            known = {"decision": launch.pk, "at": launch.at.isoformat(), "seed": launch.inputs["seed"]}
            action_order(actor, row, Action.Kind.FIRST_SERVED, {"launch": known})
    return row
