"""SLO classes, and the mapping from priorities to targets (HyperFlexis sec. 5.2)."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from controller.models.base import NAME, Versioned, above_zero, positive, share


class SLOClass(Versioned):
    """Targets in seconds. `tenant` null: for all tenants; a tenant's own class of the same name takes precedence."""

    tenant = models.ForeignKey(
        "controller.Tenant", null=True, blank=True, on_delete=models.CASCADE, related_name="slo_classes"
    )
    name = models.CharField(max_length=64, validators=[NAME])
    title = models.CharField(max_length=120, blank=True)
    ttft_s = models.FloatField("time to first token", validators=[above_zero])
    tpot_s = models.FloatField("time per output token", validators=[above_zero])
    deadline_s = models.FloatField("end-to-end deadline", null=True, blank=True, validators=[above_zero])
    waiting_time_s = models.FloatField("maximum waiting time", default=5.0, validators=[above_zero])
    target = models.FloatField("attainment target", default=0.95, validators=[share])
    value = models.FloatField("value of an attained request", default=1.0, validators=[above_zero])
    may_defer = models.BooleanField(default=False)

    class Meta:
        db_table = "slo_class"
        verbose_name = "SLO class"
        verbose_name_plural = "SLO classes"
        ordering = ["ttft_s", "tpot_s", "name"]
        constraints = [
            models.UniqueConstraint(fields=["tenant", "name"], nulls_distinct=False, name="slo_class_unique"),
            positive("ttft_s", name="slo_class_ttft_positive"),
            positive("tpot_s", name="slo_class_tpot_positive"),
            positive("deadline_s", name="slo_class_deadline_positive", optional=True),
            positive("waiting_time_s", name="slo_class_waiting_positive"),
            positive("value", name="slo_class_value_positive"),
            models.CheckConstraint(condition=Q(target__gt=0, target__lte=1), name="slo_class_target_is_share"),
            models.CheckConstraint(
                condition=Q(deadline_s__isnull=True) | Q(deadline_s__gte=models.F("ttft_s")),
                name="slo_class_deadline_after_ttft",
            ),
        ]

    def __str__(self) -> str:
        return self.name


class PriorityMapping(Versioned):
    """The configuration of a `slo.mapping.PriorityMapping`. `levels`: core.snapshot.LevelBounds as JSON objects; level
    0 is the most urgent. At most one mapping for each tenant."""

    tenant = models.ForeignKey(
        "controller.Tenant", null=True, blank=True, on_delete=models.CASCADE, related_name="priority_mappings"
    )
    levels = models.JSONField()
    window = models.PositiveIntegerField("window size in requests", default=1000, validators=[above_zero])
    window_age_s = models.FloatField("window age in seconds", default=300.0, validators=[above_zero])
    contention = models.CharField("lower bound under contention", max_length=32, default="relax_to_next_higher")

    class Meta:
        db_table = "priority_mapping"
        ordering = ["tenant_id"]
        constraints = [
            models.UniqueConstraint(fields=["tenant"], nulls_distinct=False, name="priority_mapping_unique"),
            positive("window", name="priority_mapping_window_positive"),
            positive("window_age_s", name="priority_mapping_age_positive"),
        ]

    def __str__(self) -> str:
        return f"priorities of {self.tenant.name if self.tenant else 'all tenants'}"
