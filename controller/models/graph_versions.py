"""Versions of the pattern graphs of a tenant's workflows, as the trainer judged them."""

from __future__ import annotations

from django.db import models
from django.db.models import Q


class GraphVersion(models.Model):
    """Pattern graphs of a tenant's recorded workflows, judged on later ones. Its newest version with `content` is in
    force; one with `refused` never was. `content` (`GraphSet.to_bytes`) is kept for the newest versions alone.

    `error`: mean absolute difference between the share of the time left that a step took and what the graphs said;
    `even_error`: the same of equal shares for the rest of a workflow of the mean length, which is what they had to
    beat. `matched`: share of the judged steps that were like a graph.
    """

    tenant = models.CharField(max_length=64)
    version = models.PositiveIntegerField()
    trained_at = models.DateTimeField()
    first_at = models.DateTimeField()  # beginnings of the workflows that it was made of
    last_at = models.DateTimeField()
    workflows = models.PositiveIntegerField()
    graphs = models.PositiveIntegerField()
    judged = models.PositiveIntegerField()  # workflows
    matched = models.FloatField()
    error = models.FloatField()
    even_error = models.FloatField()
    refused = models.CharField(max_length=200, blank=True, default="")
    digest = models.CharField(max_length=64, blank=True, default="")  # SHA-256 of `content`, hex
    content = models.BinaryField(null=True)

    class Meta:
        db_table = "graph_version"
        verbose_name = "version of pattern graphs"
        verbose_name_plural = "versions of pattern graphs"
        ordering = ["tenant", "-version"]
        constraints = [
            models.UniqueConstraint(fields=["tenant", "version"], name="graph_version_unique"),
            models.CheckConstraint(
                condition=Q(content__isnull=True) | (Q(refused="") & ~Q(digest="")), name="graph_version_content"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.tenant} {self.version}"
