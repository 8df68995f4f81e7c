"""Priority mappings: how a priority becomes SLO targets (HyperFlexis sec. 5.2). At most one per tenant."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsOperator
from api.control.framework.base import SIGNED_IN, ControlView, PageQuery, filtered
from api.control.framework.documented import CREATED, FOUND, MATCHED, PATCHED, PUT, operation, page_of
from api.control.framework.fields import SecondsSerializerField, VersionedOutput, VersionField, checked_name
from api.control.framework.preconditions import claimed_version, expected, matched_version
from api.control.framework.references import tenant_named
from controller.models import PriorityMapping
from controller.selectors.catalogue import priority_mappings
from controller.services.slo.priority_mappings import (
    LEVELS_MAX,
    priority_mapping_create,
    priority_mapping_put,
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
    """One priority level: its initial targets, and the range in which they follow the measurements. Seconds."""

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
        help_text="Most urgent first: level 0 serves priority 0. No level may be tighter than the one before it.",
    )
    window = serializers.IntegerField(min_value=1, max_value=100_000, required=False)
    window_age_s = SecondsSerializerField(required=False)
    contention = serializers.ChoiceField(choices=CONTENTION_RULES, required=False)


class PriorityMappingInput(_MappingFields):
    """A new mapping; its tenant never changes."""

    tenant = serializers.CharField(
        max_length=64, allow_null=True, required=False, help_text="Owner's name; null: for all tenants."
    )


class PriorityMappingPut(_MappingFields):
    """All fields of a mapping; absent ones get their default value."""


class PriorityMappingPatch(_MappingFields):
    """A change; absent fields keep their values."""

    version = VersionField()


class PriorityMappingOutput(VersionedOutput):
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
        errors=PATCHED,
    )
    def patch(self, request: Request, pk: int) -> Response:
        data = self.body(PriorityMappingPatch, partial=True)
        version = claimed_version(request, data)
        row = priority_mapping_update(actor=self.actor, mapping_id=pk, version=version, changes=data)
        return self.one(row, PriorityMappingOutput)

    @operation("priority_mapping_remove", "Remove a priority mapping", status=204, errors=MATCHED)
    def delete(self, request: Request, pk: int) -> Response:
        priority_mapping_remove(actor=self.actor, mapping_id=pk, version=matched_version(request))
        return Response(status=status.HTTP_204_NO_CONTENT)


class _OneMapping(ControlView):
    """The shared mapping, or that of a tenant."""

    access: ClassVar = {"GET": SIGNED_IN, "PUT": IsOperator, "DELETE": IsOperator}

    def read(self, owner: str | None) -> Response:
        return self.one(self._row(owner), PriorityMappingOutput)

    def replace(self, request: Request, owner: str | None) -> Response:
        tenant = tenant_named(owner, "tenant")
        data = self.body(PriorityMappingPut)
        row, created = priority_mapping_put(actor=self.actor, tenant=tenant, values=data, expected=expected(request))
        return self.stored(row, PriorityMappingOutput, created)

    def remove(self, request: Request, owner: str | None) -> Response:
        row = self._row(owner)
        priority_mapping_remove(actor=self.actor, mapping_id=row.pk, version=matched_version(request))
        return Response(status=status.HTTP_204_NO_CONTENT)

    def _row(self, owner: str | None) -> PriorityMapping:
        row: PriorityMapping = self.only(priority_mappings(of=self.tenant_id).filter(tenant__name=owner))
        return row


reads = partial(operation, answer=PriorityMappingOutput, errors=(400, *FOUND))
replaces = partial(operation, body=PriorityMappingPut, answer=PriorityMappingOutput, errors=PUT, created=True)
removes = partial(operation, status=204, errors=MATCHED)


class SharedPriorityMapping(_OneMapping):
    """The mapping of all tenants that have none of their own."""

    @reads("priority_mapping_get_shared", "Read the shared priority mapping")
    def get(self, request: Request) -> Response:
        return self.read(None)

    @replaces("priority_mapping_put_shared", "Create or replace the shared priority mapping")
    def put(self, request: Request) -> Response:
        return self.replace(request, None)

    @removes("priority_mapping_remove_shared", "Remove the shared priority mapping")
    def delete(self, request: Request) -> Response:
        return self.remove(request, None)


class PriorityMappingByTenant(_OneMapping):
    """The mapping of one tenant."""

    @reads("priority_mapping_get_by_tenant", "Read a tenant's priority mapping")
    def get(self, request: Request, tenant: str) -> Response:
        return self.read(checked_name(tenant, "tenant", max_length=64))

    @replaces("priority_mapping_put_by_tenant", "Create or replace a tenant's priority mapping")
    def put(self, request: Request, tenant: str) -> Response:
        return self.replace(request, checked_name(tenant, "tenant", max_length=64))

    @removes("priority_mapping_remove_by_tenant", "Remove a tenant's priority mapping")
    def delete(self, request: Request, tenant: str) -> Response:
        return self.remove(request, checked_name(tenant, "tenant", max_length=64))
