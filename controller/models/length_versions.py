"""Versions of the forests that bound the lengths of answers, as the trainer judged them."""

from __future__ import annotations

from django.db import models
from django.db.models import Q


class LengthVersion(models.Model):
    """A forest trained on a model's recorded requests and judged on later ones. Its newest version with `content` is in
    force; one with `refused` never was. `content` (`LengthForest.to_bytes`) is kept for the newest versions alone.

    `coverage`: share of the judged answers that the upper bound covered; `pinball`: mean loss at 0.9, in tokens. Both
    also of the constant quantile of each class, which is what it had to beat. `coverage_by_tokens`: for each count of
    tokens in `PRODUCED`, that of the bound asked again when so many were out, of the judged answers that were longer:
    objects of `tokens`, `answers` and `coverage` (null without answers). Empty for versions of older releases.
    """

    model = models.CharField(max_length=120)
    version = models.PositiveIntegerField()
    trained_at = models.DateTimeField()
    first_at = models.DateTimeField()  # of the answers that it was trained on
    last_at = models.DateTimeField()
    answers = models.PositiveIntegerField()
    cut_answers = models.PositiveIntegerField()  # of these, censored
    judged = models.PositiveIntegerField()
    coverage = models.FloatField()
    coverage_by_tokens = models.JSONField(default=list, db_default=[])
    class_coverage = models.FloatField()
    pinball = models.FloatField()
    class_pinball = models.FloatField()
    refused = models.CharField(max_length=200, blank=True, default="")
    digest = models.CharField(max_length=64, blank=True, default="")  # SHA-256 of `content`, hex
    content = models.BinaryField(null=True)

    class Meta:
        db_table = "length_version"
        verbose_name = "version of length bounds"
        verbose_name_plural = "versions of length bounds"
        ordering = ["model", "-version"]
        constraints = [
            models.UniqueConstraint(fields=["model", "version"], name="length_version_unique"),
            models.CheckConstraint(
                condition=Q(content__isnull=True) | (Q(refused="") & ~Q(digest="")), name="length_version_content"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.model} {self.version}"
