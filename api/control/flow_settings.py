"""The flow settings: who may send first on a shared link, and which waiting requests are pruned (MFS)."""

from __future__ import annotations

from typing import ClassVar

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsOperator, IsViewer
from api.control.framework.base import ControlView
from api.control.framework.documented import FOUND, PUT, operation
from api.control.framework.fields import VersionedOutput
from api.control.framework.preconditions import expected
from controller.flow.gate import GATED, OFF
from controller.models import FlowSettings
from controller.selectors.catalogue import flow_settings
from controller.services.slo.flow_settings import flow_settings_put


class FlowSettingsPut(serializers.Serializer):
    """All flow settings; absent ones get their default value."""

    flow_policy = serializers.ChoiceField(
        choices=(OFF, *GATED),
        required=False,
        help_text="Which transfers may send first on a host's link. `off`: all send at once.",
    )
    drop_budget = serializers.FloatField(
        min_value=0,
        max_value=1,
        required=False,
        help_text=(
            "Largest share of an instance's waiting requests that is pruned at a time: served last, so that the others "
            "are in time. Only where requests wait at several gateways. 0 prunes nothing."
        ),
    )
    ordering = serializers.CharField(
        max_length=64,
        required=False,
        allow_blank=True,
        help_text="The ordering by which gateways consider waiting requests. Empty: each keeps the one that it was "
        "started with.",
    )
    ordering_options = serializers.DictField(required=False, help_text="Settings of the ordering that differ.")


class FlowSettingsOutput(VersionedOutput):
    """The flow settings. Transfer daemons follow a change within a few seconds."""

    class Meta:
        model = FlowSettings
        fields = ("flow_policy", "drop_budget", "ordering", "ordering_options", "version", "created_at", "updated_at")
        read_only_fields = fields


class FlowSettingsView(ControlView):
    """The flow settings. Until they are stored, each transfer daemon follows its own `FLOW_POLICY`."""

    access: ClassVar = {"GET": IsViewer, "PUT": IsOperator}

    @operation("flow_settings_get", "Read the flow settings", answer=FlowSettingsOutput, errors=FOUND)
    def get(self, request: Request) -> Response:
        return self.one(self.only(flow_settings()), FlowSettingsOutput)

    @operation(
        "flow_settings_put",
        "Create or replace the flow settings",
        body=FlowSettingsPut,
        answer=FlowSettingsOutput,
        errors=PUT,
        created=True,
    )
    def put(self, request: Request) -> Response:
        data = self.body(FlowSettingsPut)
        row, created = flow_settings_put(actor=self.actor, values=data, expected=expected(request))
        return self.stored(row, FlowSettingsOutput, created)
