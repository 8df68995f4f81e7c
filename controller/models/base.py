"""What editable rows share."""

from __future__ import annotations

import math

from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator
from django.db import models

NAME = RegexValidator(
    r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$", "Letters, digits and . _ : / - only, starting with a letter or digit."
)


def above_zero(value: float) -> None:
    """Validator. NaN and infinity too are refused: PostgreSQL would store them, and sort NaN above everything."""
    if not (math.isfinite(value) and value > 0):
        raise ValidationError("Must be a number above 0.")


def zero_or_more(value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValidationError("Must be 0 or more.")


def share(value: float) -> None:
    if not 0 < value <= 1:
        raise ValidationError("Must be above 0 and at most 1.")


class Versioned(models.Model):
    """`version` rises with each change: an update names the version it saw, and a second saver sees the conflict."""

    version = models.PositiveIntegerField(default=1, editable=False)
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        abstract = True


def positive(field: str, *, name: str, optional: bool = False) -> models.CheckConstraint:
    """CHECK that a number is above zero (or null where `optional`)."""
    condition = models.Q(**{f"{field}__gt": 0})
    if optional:
        condition |= models.Q(**{f"{field}__isnull": True})
    return models.CheckConstraint(condition=condition, name=name)
