"""Versions of pattern graphs: which is in force for each tenant, what each was made of and how it was judged."""

from __future__ import annotations

from typing import Any, ClassVar

from django.utils import timezone
from rest_framework import serializers
from rest_framework.exceptions import NotFound
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsViewer
from api.control.framework.base import ControlView
from api.control.framework.documented import FOUND, LISTED, operation
from api.control.framework.takeovers import TakeoverRow, reporting, rows_of
from controller.core.messages import GRAPHS
from controller.models import GraphVersion
from controller.predict.graph_edges import most_used
from controller.selectors.records.graph_versions import TenantVersions, graphs_in_use, kind_names, tenant_versions


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
    gateways = TakeoverRow(
        many=True, allow_null=True, help_text="Null: Redis is unavailable. Those that reported lately, by name."
    )
    versions = GraphVersionRow(
        many=True, help_text="Newest first: the five newest, and the newest that passed if it is older."
    )


class GraphVersionsOutput(serializers.Serializer):
    """All tenants that have pattern graphs, by name."""

    items = TenantGraphsRow(many=True)


class GraphVersionsView(ControlView):
    """Pattern graphs by tenant, as under *Answer lengths*."""

    access: ClassVar = {"GET": IsViewer}

    @operation("graph_versions", "Versions of pattern graphs", answer=GraphVersionsOutput, errors=LISTED)
    def get(self, request: Request) -> Response:
        now, fleets = timezone.now(), reporting()
        rows = [
            _row(each) | {"gateways": rows_of(fleets, GRAPHS, each.tenant, each.in_force, now)}
            for each in tenant_versions(now)
        ]
        return Response(GraphVersionsOutput({"items": rows}).data)


def _row(each: TenantVersions) -> dict[str, Any]:
    in_force = None if each.in_force is None else each.in_force.version
    return {"tenant": each.tenant, "in_force": in_force, "versions": each.versions}


class GraphsQuery(serializers.Serializer):
    """Whose graphs, and how many."""

    tenant = serializers.CharField(max_length=64)
    most = serializers.IntegerField(min_value=1, max_value=50, default=10)


class GraphCallRow(serializers.Serializer):
    """A call. Tokens within 6 %."""

    number = serializers.IntegerField(help_text="From 1; `edges` name it so.")
    level = serializers.IntegerField(help_text="From 1: one more than the highest of those that it follows.")
    kind = serializers.CharField(help_text="Stage and model, or tool. A number in hex: of no request of the last day.")
    input_tokens = serializers.IntegerField()
    output_tokens = serializers.IntegerField()


class GraphLevelRow(serializers.Serializer):
    """Times of a level, in seconds, within 8 %."""

    gap_s = serializers.FloatField(help_text="From the end of the level before it.")
    run_s = serializers.FloatField(help_text="From its first call's beginning to its last one's end.")


class PatternGraphRow(serializers.Serializer):
    """A recorded workflow that stands for others like it."""

    number = serializers.IntegerField()
    used = serializers.FloatField(help_text="Workflows that it stands for; those of the last hours count more.")
    seconds = serializers.FloatField(help_text="Of the whole workflow.")
    nodes = GraphCallRow(many=True, help_text="At most 35.")
    edges = serializers.ListField(
        child=serializers.ListField(child=serializers.IntegerField(), min_length=2, max_length=2),
        help_text=(
            "Pairs of calls: each call of a level with each call of the next level. Graphs store levels only; the "
            "parents that a client named for a call may be fewer."
        ),
    )
    levels = GraphLevelRow(many=True)
    more_calls = serializers.IntegerField(help_text="After `nodes`.")
    more_levels = serializers.IntegerField()


class PatternGraphsOutput(serializers.Serializer):
    """The pattern graphs in force, those that stand for most workflows first."""

    tenant = serializers.CharField()
    version = serializers.IntegerField()
    digest = serializers.CharField()
    graphs = serializers.IntegerField(help_text="All of the version.")
    items = PatternGraphRow(many=True)


class PatternGraphsView(ControlView):
    """Nodes and edges of a tenant's pattern graphs."""

    access: ClassVar = {"GET": IsViewer}

    @operation("pattern_graphs", "Pattern graphs of a tenant", query=GraphsQuery, answer=PatternGraphsOutput,
               errors=(400, *FOUND))  # fmt: skip
    def get(self, request: Request) -> Response:
        query, now = self.query(GraphsQuery), timezone.now()
        found = graphs_in_use(query["tenant"], now)
        if found is None:
            raise NotFound("This tenant has no pattern graphs in use.")
        row, graphs = found
        items = most_used(graphs, kind_names(query["tenant"], now), query["most"])
        shown = {"tenant": row.tenant, "version": row.version, "digest": row.digest, "graphs": len(graphs)}
        return Response(PatternGraphsOutput({**shown, "items": items}).data)
