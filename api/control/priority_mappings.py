"""Priority mappings: how a priority becomes SLO targets (HyperFlexis sec. 5.2). At most one per tenant."""

from __future__ import annotations

from typing import ClassVar

from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsOperator
from api.control.framework.base import SIGNED_IN, ControlView, PageQuery, claimed_version, filtered, matched_version
from api.control.framework.documented import CHANGED, CREATED, FOUND, operation, page_of
from api.control.framework.fields import SecondsSerializerField, VersionField
from api.control.framework.references import tenant_named
from controller.models import PriorityMapping
from controller.selectors.catalogue import priority_mappings
from controller.services.slo.priority_mappings import (
    LEVELS_MAX,
    priority_mapping_create,
    priority_mapping_remove,
    priority_mapping_update,
)
from controller.slo.mapping import CONTENTION_RULES


class PriorityMappingQuery(PageQuery):
    """Filters of the list."""

    tenant = serializers.CharField(
        max_length=64, required=False, allow_blank=True, help_text="A tenant's name; empty: the shared mapping."
    )


class LevelField(serializers.Serializer):
    """One priority level: its targets before there is history, and the range they may move in."""

    ttft_s = SecondsSerializerField()
    tpot_s = SecondsSerializerField()
    ttft_min_s = SecondsSerializerField()
    ttft_max_s = SecondsSerializerField()
    tpot_min_s = SecondsSerializerField()
    tpot_max_s = SecondsSerializerField()


class _MappingFields(serializers.Serializer):
    levels = serializers.ListField(
        child=LevelField(),
        min_length=1,
        max_length=LEVELS_MAX,
        help_text="Level 0 is the most urgent: no level may be tighter than the level before it.",
    )
    window = serializers.IntegerField(min_value=1, max_value=100_000, required=False)
    window_age_s = SecondsSerializerField(required=False)
    contention = serializers.ChoiceField(choices=CONTENTION_RULES, required=False)


class PriorityMappingInput(_MappingFields):
    """A new mapping; its tenant never changes."""

    tenant = serializers.CharField(
        max_length=64, allow_null=True, required=False, help_text="Owner's name; null: for all tenants."
    )


class PriorityMappingPatch(_MappingFields):
    """A change; absent fields keep their values."""

    version = VersionField()


class PriorityMappingOutput(serializers.ModelSerializer):
    """A priority mapping."""

    tenant = serializers.CharField(source="tenant.name", allow_null=True, default=None)
    levels = serializers.ListField(child=LevelField())

    class Meta:
        model = PriorityMapping
        fields = (
            "id", "tenant", "levels", "window", "window_age_s", "contention", "version", "created_at", "updated_at",
        )  # fmt: skip
        read_only_fields = fields


class PriorityMappingList(ControlView):
    """All priority mappings the caller may see, and new ones."""

    access: ClassVar = {"GET": SIGNED_IN, "POST": IsOperator}

    @operation(
        "priority_mapping_list",
        "List priority mappings",
        query=PriorityMappingQuery,
        answer=page_of(PriorityMappingOutput),
    )
    def get(self, request: Request) -> Response:
        query = self.query(PriorityMappingQuery)
        rows = filtered(priority_mappings(of=self.tenant_id), query, {"tenant": "tenant__name"})
        return self.page(rows, ("id",), PriorityMappingOutput, query)

    @operation(
        "priority_mapping_create",
        "Create a priority mapping",
        body=PriorityMappingInput,
        answer=PriorityMappingOutput,
        status=201,
        errors=CREATED,
    )
    def post(self, request: Request) -> Response:
        data = self.body(PriorityMappingInput)
        data["tenant"] = tenant_named(data.get("tenant"), "tenant")
        row = priority_mapping_create(actor=self.actor, **data)
        return self.one(row, PriorityMappingOutput, status.HTTP_201_CREATED)


class PriorityMappingDetail(ControlView):
    """One priority mapping."""

    access: ClassVar = {"GET": SIGNED_IN, "PATCH": IsOperator, "DELETE": IsOperator}

    @operation("priority_mapping_get", "Read a priority mapping", answer=PriorityMappingOutput, errors=FOUND)
    def get(self, request: Request, pk: int) -> Response:
        return self.one(self.found(priority_mappings(of=self.tenant_id), pk), PriorityMappingOutput)

    @operation(
        "priority_mapping_update",
        "Change a priority mapping",
        body=PriorityMappingPatch,
        answer=PriorityMappingOutput,
        errors=CHANGED,
    )
    def patch(self, request: Request, pk: int) -> Response:
        data = self.body(PriorityMappingPatch, partial=True)
        version = claimed_version(request, data)
        row = priority_mapping_update(actor=self.actor, mapping_id=pk, version=version, changes=data)
        return self.one(row, PriorityMappingOutput)

    @operation("priority_mapping_remove", "Remove a priority mapping", status=204, errors=CHANGED)
    def delete(self, request: Request, pk: int) -> Response:
        priority_mapping_remove(actor=self.actor, mapping_id=pk, version=matched_version(request))
        return Response(status=status.HTTP_204_NO_CONTENT)
