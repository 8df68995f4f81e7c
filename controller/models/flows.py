"""How flows on shared links and waiting requests are ordered, and which of these are pruned."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from controller.flow.gate import GATED, OFF
from controller.models.base import Versioned

NO_OPTIONS = models.Value({}, output_field=models.JSONField())


class FlowSettings(Versioned):
    """One row (id 1). Until it exists, each transfer daemon follows its own FLOW_POLICY, and nothing is pruned.

    `flow_policy`: OFF or one of GATED. `drop_budget`: largest share of an instance's waiting requests that is pruned at
    a time (MFS, App. B); 0: nothing is. `ordering`: of waiting requests, by name, with its `ordering_options`; empty:
    each gateway keeps the one that it was started with.
    """

    flow_policy = models.CharField("flow policy", max_length=32, default=OFF)
    drop_budget = models.FloatField("drop budget", default=0.0)
    ordering = models.CharField(max_length=64, blank=True, default="", db_default="")
    ordering_options = models.JSONField(blank=True, default=dict, db_default=NO_OPTIONS)

    class Meta:
        db_table = "flow_settings"
        verbose_name_plural = "flow settings"
        constraints = [
            models.CheckConstraint(condition=Q(id=1), name="flow_settings_one_row"),
            models.CheckConstraint(condition=Q(flow_policy__in=(OFF, *GATED)), name="flow_settings_policy"),
            models.CheckConstraint(condition=Q(drop_budget__gte=0, drop_budget__lte=1), name="flow_settings_budget"),
        ]

    def __str__(self) -> str:
        return "flow settings"
