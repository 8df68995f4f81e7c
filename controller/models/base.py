"""What editable tables share."""

from __future__ import annotations

import math

from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator
from django.db import models

NAME = RegexValidator(
    r"\A[A-Za-z0-9][A-Za-z0-9._:/-]*\Z", "Letters, digits and . _ : / - only, starting with a letter or digit."
)
# Of an instance: it is one part of addresses and of files.
INSTANCE_ID = RegexValidator(
    r"\A[A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*\Z",
    "Use letters, digits and . _ - and start with a letter or digit.",
)


def above_zero(value: float) -> None:
    """Validator. Rejects NaN and infinity as well, which PostgreSQL would store, with NaN above every number."""
    if not (math.isfinite(value) and value > 0):
        raise ValidationError("Must be a number above 0.")


def zero_or_more(value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValidationError("Must be 0 or more.")


def share(value: float) -> None:
    if not 0 < value <= 1:
        raise ValidationError("Must be above 0 and at most 1.")


class Versioned(models.Model):
    """`version` rises with each change. An update names the version that it is based on, so a concurrent one
    conflicts."""

    version = models.PositiveIntegerField(default=1, editable=False)
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        abstract = True


def positive(field: str, *, name: str, optional: bool = False) -> models.CheckConstraint:
    """A CHECK constraint that a number is above zero (or null, if `optional`)."""
    condition = models.Q(**{f"{field}__gt": 0})
    if optional:
        condition |= models.Q(**{f"{field}__isnull": True})
    return models.CheckConstraint(condition=condition, name=name)
