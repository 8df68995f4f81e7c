"""The version by which gateways notice that they must read their configuration again."""

from __future__ import annotations

from django.db import models


class ConfigVersion(models.Model):
    """One row (id 1), raised in the transaction of every change that gateways must see."""

    version = models.BigIntegerField(default=1)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        db_table = "config_version"
        constraints = [models.CheckConstraint(condition=models.Q(id=1), name="config_version_one_row")]

    def __str__(self) -> str:
        return f"version {self.version}"
