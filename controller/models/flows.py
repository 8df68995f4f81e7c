"""How flows on shared links are ordered."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from controller.flow.gate import GATED, OFF
from controller.models.base import Versioned


class FlowSettings(Versioned):
    """One row (id 1). Until it exists, each transfer daemon follows its own FLOW_POLICY. `flow_policy`: OFF or one of
    GATED."""

    flow_policy = models.CharField("flow policy", max_length=32, default=OFF)

    class Meta:
        db_table = "flow_settings"
        verbose_name_plural = "flow settings"
        constraints = [
            models.CheckConstraint(condition=Q(id=1), name="flow_settings_one_row"),
            models.CheckConstraint(condition=Q(flow_policy__in=(OFF, *GATED)), name="flow_settings_policy"),
        ]

    def __str__(self) -> str:
        return "flow settings"
