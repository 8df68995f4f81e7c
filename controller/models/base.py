"""What editable rows share."""

from __future__ import annotations

from django.core.validators import RegexValidator
from django.db import models

NAME = RegexValidator(
    r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$", "Letters, digits and . _ : / - only, starting with a letter or digit."
)


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
