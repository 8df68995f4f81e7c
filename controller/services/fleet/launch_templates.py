"""Launch templates: kept, checked, paused after failed starts, and turned into what a provisioner needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from controller.core.types import KEY_MADE
from controller.engine import placement, runtime_env
from controller.engine.launch_template import LONGEST_START_S, LaunchTemplate, problems, rendered, split_environment
from controller.engine.runtime_env import RUNTIME_ENV
from controller.engine.shipped_templates import SHIPPED
from controller.models import Decision, Instance
from controller.models import LaunchTemplate as Row
from controller.models.fleet import KvRole, Role
from controller.services import change
from controller.services.actors import SYSTEM, Actor
from controller.services.config import config_version_raise
from controller.services.decisions import decision_record
from controller.services.replace import ExpectedVersion, defaults_of, put

KIND = "launch_template"
EDITABLE = (*("backend", "roles", "command", "environment", "spec", "health_path", "key_variable", "start_limit_s"),)
BACKENDS = ("reference", "sglang", "vllm")
FACTS = ("kv_role", *placement.FIELDS)  # that a template may say about its engines, and an instance about its own
# What only a template may say, since it runs programs as the command does.
OF_TEMPLATE = (*FACTS, RUNTIME_ENV)
EXAMPLE: Mapping[str, str] = {
    **{"id": "vllm-1", "model": "/models/example", "served_name": "example", "host": "127.0.0.1", "port": "8100"},
    **{"context": "4096", "slots": "16", "role": "collocated", "tp": "1", "device": "0", "python": "python3"},
}


def launch_template_create(*, actor: Actor, name: str, backend: str, command: Sequence[str], **values: Any) -> Row:
    """`values`: other fields of EDITABLE."""
    row = Row(name=name, backend=backend, command=list(command), **{"roles": [Role.COLLOCATED.value], **values})
    return change.create(row, actor=actor, kind=KIND, check=_check, gateways=False)


def launch_template_update(*, actor: Actor, template_id: int, version: int | None, changes: Mapping[str, Any]) -> Row:
    """A changed template is no longer paused: it is another one than that whose starts failed."""
    with transaction.atomic():
        before = Row.objects.select_for_update().get(pk=template_id)
        row = change.update(
            Row,
            template_id,
            actor=actor,
            kind=KIND,
            version=version,
            changes=changes,
            editable=EDITABLE,
            check=_check,
            gateways=False,
        )
        if before.paused_at is not None and row.version != before.version:
            _resume(row, actor)
    return row


def launch_template_put(
    *, actor: Actor, name: str, values: Mapping[str, Any], expected: ExpectedVersion
) -> tuple[Row, bool]:
    """Create the template or replace its values; whether it was created. Absent values get their default."""

    absent = {**defaults_of(Row, values, EDITABLE), "roles": [Role.COLLOCATED.value]}

    def change_to(row: Row) -> Row:
        changes = {**absent, **values}
        return launch_template_update(actor=actor, template_id=row.pk, version=row.version, changes=changes)

    return put(
        Row,
        {"name": name},
        expected=expected,
        absent=absent,
        create=lambda: launch_template_create(actor=actor, name=name, **values),
        change=change_to,
    )


def launch_template_remove(*, actor: Actor, template_id: int, version: int | None = None) -> None:
    """Raises ValidationError while instances were started from it."""
    change.remove(Row, template_id, actor=actor, kind=KIND, version=version, gateways=False)


def launch_template_resume(*, actor: Actor, template_id: int, version: int | None = None) -> Row:
    """Start instances from it again. Nothing happens if it is not paused."""
    with transaction.atomic():
        row = Row.objects.select_for_update().get(pk=template_id)
        if version is not None and row.version != version:
            raise change.VersionConflict(str(row), version, row.version)
        if row.paused_at is not None:
            _resume(row, actor)
    return row


def launch_template_pause(*, actor: Actor, row: Row, instance: str, failures: int, error: str) -> Decision | None:
    """Start nothing from it until a person has looked: `failures` instances in a row did not become ready. None if it
    is paused already."""
    with transaction.atomic():
        row = Row.objects.select_for_update().get(pk=row.pk)
        if row.paused_at is not None:
            return None
        row.paused_at, row.paused_reason = timezone.now(), error
        row.version += 1
        row.save(update_fields=["paused_at", "paused_reason", "version", "updated_at"])
        decision = decision_record(
            actor=actor,
            kind="launch_template_paused",
            subject_type=KIND,
            subject=row.name,
            reason="starts_failed",
            inputs={"instance": instance, "never_ready": failures, "error": error},
        )
        config_version_raise()  # requests no longer wait for an instance from it
        return decision


def _resume(row: Row, actor: Actor) -> None:
    row.paused_at, row.paused_reason = None, ""
    row.version += 1
    row.save(update_fields=["paused_at", "paused_reason", "version", "updated_at"])
    change.audit(actor, KIND, "resumed", row, {})
    config_version_raise()


def shipped_templates_store() -> int:
    """Store the templates that come with Slackline, but none that a person removed; returns how many were new."""
    known = set(Row.objects.values_list("name", flat=True))
    removed = Decision.objects.filter(kind=f"{KIND}_removed", subject__in=list(SHIPPED))
    gone = set(removed.values_list("subject", flat=True))
    new = [name for name in SHIPPED if name not in known | gone]
    for name in new:
        launch_template_create(actor=SYSTEM, name=name, **SHIPPED[name])
    return len(new)


# ---- from a template to an engine -----------------------------------------------------------------------------------


def template_of(row: Row) -> LaunchTemplate:
    plain, secrets = split_environment(row.environment)
    return LaunchTemplate(tuple(row.command), plain, secrets, row.health_path, row.start_limit_s, row.key_variable)


def example(row: Row) -> list[str]:
    """The command with example values, to be read before it is used."""
    made = rendered(template_of(row), {**EXAMPLE, "role": (row.roles or [EXAMPLE["role"]])[0]})
    return [each.replace("$$", "$") for each in made.command]


def launch_of(row: Instance) -> dict[str, Any]:
    """What a provisioner needs to start the instance from its template: everything but the fields that are known at the
    start only. Secrets are names."""
    if row.template is None:
        raise ValueError(f"{row} has no template")
    values = {
        "id": row.pk,
        "model": str(row.spec.get("folder") or row.model.name),
        "served_name": row.model.name,
        "context": str(row.model.context_tokens),
        "slots": str(row.max_num_seqs),
        "role": row.role_at_start,
        "tp": str(row.tp),
        "device": ",".join(map(str, devices_of(row))),
    }
    made = asdict(rendered(template_of(row.template), values))
    return {**made, "command": list(made["command"]), "backend": row.backend}


def devices_of(row: Instance) -> list[int]:
    """Indexes of the devices that it holds on its host."""
    held = row.holdings.filter(released_at__isnull=True).order_by("device__index")
    return list(held.values_list("device__index", flat=True))


def fields_from(template: Row, role: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of an instance that follow from its template. Raises ValidationError if it cannot be started from it."""
    if template.paused_at is not None:
        told = f"{template} is paused, because starts from it failed: {template.paused_reason} Change or resume it."
        raise ValidationError({"template": told})
    if role not in template.roles:
        raise ValidationError({"role": f"{template} starts {', '.join(template.roles)} instances only."})
    key_name = KEY_MADE if template.key_variable else ""
    return {"backend": template.backend, "spec": {**facts_of(template), **spec}, "key_name": key_name}


def facts_of(template: Row) -> dict[str, Any]:
    """What an instance's spec has of its template's, unless it says something else itself."""
    return {name: value for name, value in template.spec.items() if name in FACTS}


def _check(row: Row) -> None:
    errors = problems(row.command, row.environment, row.health_path, row.key_variable)
    if row.backend not in BACKENDS:
        errors["backend"] = f"Must be one of: {', '.join(BACKENDS)}."
    if not _are(row.roles, Role.values):
        errors["roles"] = f"Must be a list of: {', '.join(Role.values)}."
    if not isinstance(row.spec, dict) or set(row.spec) - set(OF_TEMPLATE):
        errors["spec"] = f"May only have: {', '.join(OF_TEMPLATE)}."
    elif "kv_role" in row.spec and (row.backend != "vllm" or row.spec["kv_role"] not in KvRole.values):
        errors["spec"] = f"kv_role is for vLLM only and must be one of: {', '.join(KvRole.values)}."
    elif wrong := placement_problems(row.spec):
        errors |= {f"spec.{name}": why for name, why in wrong.items()}
    if not (math.isfinite(row.start_limit_s) and row.start_limit_s <= LONGEST_START_S):
        errors["start_limit_s"] = f"Must be at most {LONGEST_START_S:.0f} s."
    if errors:
        raise ValidationError(errors)


def placement_problems(spec: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong with what a template's spec says of a cluster, by field. Empty if nothing is."""
    set_up = runtime_env.problems(spec[RUNTIME_ENV]) if RUNTIME_ENV in spec else {}
    return placement.problems(spec) | set_up


def _are(values: object, allowed: Iterable[str]) -> bool:
    known = set(allowed)
    return isinstance(values, list) and bool(values) and all(isinstance(v, str) and v in known for v in values)
