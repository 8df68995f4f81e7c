"""What gateways did with published versions of what is learned from records."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from controller.core.messages import GRAPHS, LENGTHS


class LearnedTakeover(models.Model):
    """A gateway took a version over, or did not and says why in `problem` (empty: it did). `what`: LENGTHS, of the
    model `subject`, or GRAPHS, of the tenant `subject`.

    A gateway that does so again, after a restart, counts in `times`: there is a row for each outcome, not for each
    attempt. Times are of the gateway's clock. Rows go with their versions.
    """

    what = models.CharField(max_length=16)
    subject = models.CharField(max_length=120)
    version = models.PositiveIntegerField()
    gateway = models.CharField(max_length=150)
    problem = models.CharField(max_length=200, blank=True, default="")
    first_at = models.DateTimeField()
    last_at = models.DateTimeField()
    times = models.PositiveIntegerField(default=1)

    class Meta:
        db_table = "learned_takeover"
        verbose_name = "takeover of a learned version"
        verbose_name_plural = "takeovers of learned versions"
        ordering = ["what", "subject", "-version", "first_at", "id"]
        constraints = [
            models.UniqueConstraint(
                fields=["what", "subject", "version", "gateway", "problem"], name="learned_takeover_unique"
            ),
            models.CheckConstraint(condition=Q(what__in=(LENGTHS, GRAPHS)), name="learned_takeover_what"),
            models.CheckConstraint(condition=Q(first_at__lte=models.F("last_at")), name="learned_takeover_order"),
        ]

    def __str__(self) -> str:
        return f"{self.subject} {self.version} at {self.gateway}"
