"""Models that are served, and their latency profiles by device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction

from controller.core.types import LatencyCoefficients
from controller.models import LatencyProfile, ServedModel
from controller.services import change
from controller.services.actors import Actor

EDITABLE = ("aliases", "context_tokens", "chars_per_token", "tokenizer")


def served_model_create(
    *,
    actor: Actor,
    name: str,
    aliases: Sequence[str] = (),
    context_tokens: int = 4096,
    chars_per_token: float = 4.0,
    tokenizer: str = "",
) -> ServedModel:
    """`tokenizer`: path of a `tokenizer.json` or of its folder, on the gateways' machines."""
    row = ServedModel(
        name=name,
        aliases=list(aliases),
        context_tokens=context_tokens,
        chars_per_token=chars_per_token,
        tokenizer=tokenizer,
    )
    return change.create(row, actor=actor, kind="served_model", check=_check)


def served_model_update(*, actor: Actor, model_id: int, version: int | None, changes: Mapping[str, Any]) -> ServedModel:
    return change.update(
        ServedModel,
        model_id,
        actor=actor,
        kind="served_model",
        version=version,
        changes=changes,
        editable=EDITABLE,
        check=_check,
    )


def served_model_remove(*, actor: Actor, model_id: int, version: int | None = None) -> None:
    """Raises ValidationError while there are instances of it."""
    change.remove(ServedModel, model_id, actor=actor, kind="served_model", version=version)


def latency_profile_set(
    *,
    actor: Actor,
    model: ServedModel,
    device_kind: str,
    coefficients: LatencyCoefficients,
    tp: int = 1,
    role: str = "collocated",
    fit_errors: Mapping[str, float] | None = None,
    samples: int = 0,
    source: str = "",
) -> LatencyProfile:
    """Make this the active fit of (model, device kind, tp, role); earlier fits stay as history."""
    row = LatencyProfile(
        model=model,
        device_kind=device_kind,
        tp=tp,
        role=role,
        coefficients=coefficients._asdict(),
        fit_errors=dict(fit_errors or {}),
        samples=samples,
        source=source,
    )
    same = LatencyProfile.objects.filter(model=model, device_kind=device_kind, tp=tp, role=role, active=True)
    with transaction.atomic():
        list(same.select_for_update())
        same.update(active=False)
        return change.create(row, actor=actor, kind="latency_profile", check=_check_profile)


def _check(row: ServedModel) -> None:
    if not isinstance(row.aliases, list) or not all(isinstance(alias, str) and alias for alias in row.aliases):
        raise ValidationError({"aliases": "Must be a list of names."})
    if row.tokenizer and not PurePosixPath(row.tokenizer).is_absolute():
        raise ValidationError({"tokenizer": "Must be an absolute path on the gateways."})
    others = ServedModel.objects.exclude(pk=row.pk)
    taken = {name for other in others for name in (other.name, *other.aliases)}
    for field, names in (("name", [row.name]), ("aliases", row.aliases)):
        clash = sorted(taken & set(names))
        if clash:
            raise ValidationError({field: f"Already the name of another model: {', '.join(clash)}."})


def _check_profile(row: LatencyProfile) -> None:
    wrong = [name for name, value in row.coefficients.items() if not (math.isfinite(value) and value >= 0)]
    if wrong:
        raise ValidationError({f"coefficients.{name}": "Must be 0 or more." for name in wrong})
