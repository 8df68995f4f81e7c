"""Versions of pattern graphs: which is in force for each tenant, what each was made of and how it was judged."""

from __future__ import annotations

from typing import Any, ClassVar

from django.utils import timezone
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsViewer
from api.control.framework.base import ControlView
from api.control.framework.documented import LISTED, operation
from controller.models import GraphVersion
from controller.selectors.records.graph_versions import TenantVersions, tenant_versions


class GraphVersionRow(serializers.ModelSerializer):
    """One version. Errors 0..1, as shares of the time that a workflow has left: of the graphs, and of equal shares."""

    class Meta:
        model = GraphVersion
        fields = (
            "version", "trained_at", "first_at", "last_at", "workflows", "graphs", "judged", "matched", "error",
            "even_error", "refused",
        )  # fmt: skip


class TenantGraphsRow(serializers.Serializer):
    """One tenant."""

    tenant = serializers.CharField()
    in_force = serializers.IntegerField(
        allow_null=True, help_text="Null: gateways go by what its clients say of their workflows."
    )
    versions = GraphVersionRow(many=True, help_text="Newest first, at most five.")


class GraphVersionsOutput(serializers.Serializer):
    """All tenants that have pattern graphs, by name."""

    items = TenantGraphsRow(many=True)


class GraphVersionsView(ControlView):
    """Pattern graphs by tenant, as under *Answer lengths*."""

    access: ClassVar = {"GET": IsViewer}

    @operation("graph_versions", "Versions of pattern graphs", answer=GraphVersionsOutput, errors=LISTED)
    def get(self, request: Request) -> Response:
        rows = [_row(each) for each in tenant_versions(timezone.now())]
        return Response(GraphVersionsOutput({"items": rows}).data)


def _row(each: TenantVersions) -> dict[str, Any]:
    in_force = None if each.in_force is None else each.in_force.version
    return {"tenant": each.tenant, "in_force": in_force, "versions": each.versions}
