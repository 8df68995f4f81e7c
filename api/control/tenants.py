"""Tenants: quotas, entitlements, and the default class for requests that name none."""

from __future__ import annotations

from typing import ClassVar

from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsAdmin
from api.control.framework.base import SIGNED_IN, ControlView, PageQuery, filtered
from api.control.framework.documented import CREATED, FOUND, MATCHED, PATCHED, PUT, operation, page_of
from api.control.framework.fields import NameField, VersionedOutput, VersionField, checked_name
from api.control.framework.preconditions import claimed_version, expected, matched_version
from api.control.framework.references import class_named
from controller.models import Tenant
from controller.models.tenants import LONGEST_RETENTION_S, LOWEST_PRIORITY
from controller.selectors.catalogue import tenants
from controller.services.slo.tenants import (
    ENTITLEMENTS,
    MOST_NAMES,
    QUOTAS,
    tenant_create,
    tenant_put,
    tenant_remove,
    tenant_update,
)
from controller.slo.stage_deadlines import STAGE_DEADLINES

QUOTA_MAX = 2**31 - 1


class TenantQuery(PageQuery):
    """Filters of the list."""

    name = serializers.CharField(max_length=64, required=False)
    state = serializers.ChoiceField(choices=Tenant.State.choices, required=False)


def _quota(what: str, default: str) -> serializers.IntegerField:
    return serializers.IntegerField(
        min_value=1,
        max_value=QUOTA_MAX,
        allow_null=True,
        required=False,
        help_text=f"{what}; null: no limit. Default: `{default}`.",
    )


def _names(what: str) -> serializers.ListField:
    return serializers.ListField(
        child=serializers.CharField(max_length=64),
        max_length=MOST_NAMES,
        required=False,
        help_text=f"Names of the {what}; empty: all.",
    )


def _tightest(field: str) -> serializers.FloatField:
    return serializers.FloatField(
        min_value=0.0001,
        max_value=86_400.0,
        allow_null=True,
        required=False,
        help_text=f"The smallest `{field}` that its requests may name, in seconds; null: any.",
    )


class _TenantChange(serializers.Serializer):
    title = serializers.CharField(max_length=120, allow_blank=True, required=False)
    default_class = serializers.CharField(
        max_length=64, allow_null=True, required=False, help_text="Name of the tenant's own class or of a shared one."
    )
    rpm = _quota("Requests a minute", "NEW_TENANT_RPM")
    tpm = _quota("Tokens a minute", "NEW_TENANT_TPM")
    max_concurrency = _quota("Concurrent requests", "NEW_TENANT_CONCURRENCY")
    allowed_classes = _names("SLO classes that its requests may name")
    allowed_models = _names("models that its requests may use")
    highest_priority = serializers.IntegerField(
        min_value=0,
        max_value=LOWEST_PRIORITY,
        required=False,
        help_text="The smallest `priority` that its requests may set; 0, the highest priority, allows all.",
    )
    tightest_ttft_s = _tightest("target_ttft")
    tightest_tpot_s = _tightest("target_tbt")
    tightest_deadline_s = _tightest("deadline")
    queue_share = serializers.FloatField(
        min_value=0.001,
        max_value=1.0,
        allow_null=True,
        required=False,
        help_text="Its largest share of a gateway's open requests and of their bytes; null: `TENANT_QUEUE_SHARE`.",
    )
    retention_s = serializers.IntegerField(
        min_value=0,
        max_value=LONGEST_RETENTION_S,
        required=False,
        help_text="Seconds for which answers of its steps (`metadata.step_key`), and its responses with their "
        "conversations unless a client says `store` false, are kept as text; 0: none.",
    )
    stage_deadlines = serializers.ChoiceField(
        choices=STAGE_DEADLINES,
        required=False,
        help_text="How the deadline of its workflows is divided among their stages. `share_of_rest`: each gets its "
        "share of the time left; `accumulated`: due times are fixed from the beginning; `own_share`: each gets the "
        "same time whenever it begins, until the workflow is due.",
    )


class TenantInput(_TenantChange):
    """A new tenant; its name never changes."""

    name = NameField(max_length=64)


class TenantPut(_TenantChange):
    """All fields of a tenant; absent ones get their default value, except `state`, which keeps its value."""

    state = serializers.ChoiceField(choices=Tenant.State.choices, required=False)


class TenantPatch(_TenantChange):
    """A change; absent fields keep their values."""

    state = serializers.ChoiceField(choices=Tenant.State.choices, required=False)
    version = VersionField()


class TenantOutput(VersionedOutput):
    """A tenant."""

    default_class = serializers.CharField(source="default_class.name", allow_null=True, default=None)

    class Meta:
        model = Tenant
        fields = (
            "id", "name", "title", "default_class", *QUOTAS, *ENTITLEMENTS, "retention_s", "stage_deadlines", "state",
            "version",
            "created_at", "updated_at",
        )  # fmt: skip
        read_only_fields = fields


class TenantList(ControlView):
    """All tenants the caller may see, and new ones."""

    access: ClassVar = {"GET": SIGNED_IN, "POST": IsAdmin}

    @operation("tenant_list", "List tenants", query=TenantQuery, answer=page_of(TenantOutput))
    def get(self, request: Request) -> Response:
        query = self.query(TenantQuery)
        rows = filtered(tenants(of=self.tenant_id), query, {"name": "name", "state": "state"})
        return self.page(rows, ("name",), TenantOutput, query)

    @operation("tenant_create", "Create a tenant", body=TenantInput, answer=TenantOutput, status=201, errors=CREATED)
    def post(self, request: Request) -> Response:
        data = self.body(TenantInput)
        if data.get("default_class"):
            data["default_class"] = class_named(data["default_class"], "default_class", tenant=None)
        row = tenant_create(actor=self.actor, **data)
        return self.one(row, TenantOutput, status.HTTP_201_CREATED)


class TenantDetail(ControlView):
    """One tenant."""

    access: ClassVar = {"GET": SIGNED_IN, "PATCH": IsAdmin, "DELETE": IsAdmin}

    @operation("tenant_get", "Read a tenant", answer=TenantOutput, errors=FOUND)
    def get(self, request: Request, pk: int) -> Response:
        return self.one(self.found(tenants(of=self.tenant_id), pk), TenantOutput)

    @operation("tenant_update", "Change a tenant", body=TenantPatch, answer=TenantOutput, errors=PATCHED)
    def patch(self, request: Request, pk: int) -> Response:
        data = self.body(TenantPatch, partial=True)
        version = claimed_version(request, data)
        if data.get("default_class"):
            data["default_class"] = class_named(data["default_class"], "default_class", self.found(tenants(), pk))
        row = tenant_update(actor=self.actor, tenant_id=pk, version=version, changes=data)
        return self.one(row, TenantOutput)

    @operation("tenant_remove", "Remove a tenant", status=204, errors=MATCHED)
    def delete(self, request: Request, pk: int) -> Response:
        tenant_remove(actor=self.actor, tenant_id=pk, version=matched_version(request))
        return Response(status=status.HTTP_204_NO_CONTENT)


class TenantByName(ControlView):
    """The tenant of this name."""

    access: ClassVar = {"GET": SIGNED_IN, "PUT": IsAdmin, "DELETE": IsAdmin}

    @operation("tenant_get_by_name", "Read a tenant by name", answer=TenantOutput, errors=(400, *FOUND))
    def get(self, request: Request, name: str) -> Response:
        return self.one(self._row(name), TenantOutput)

    @operation(
        "tenant_put",
        "Create or replace a tenant",
        body=TenantPut,
        answer=TenantOutput,
        errors=PUT,
        created=True,
    )
    def put(self, request: Request, name: str) -> Response:
        name = checked_name(name, "name", max_length=64)
        data = self.body(TenantPut)
        if data.get("default_class"):
            own = tenants().filter(name=name).first()
            data["default_class"] = class_named(data["default_class"], "default_class", own)
        row, created = tenant_put(actor=self.actor, name=name, values=data, expected=expected(request))
        return self.stored(row, TenantOutput, created)

    @operation("tenant_remove_by_name", "Remove a tenant by name", status=204, errors=MATCHED)
    def delete(self, request: Request, name: str) -> Response:
        tenant_remove(actor=self.actor, tenant_id=self._row(name).pk, version=matched_version(request))
        return Response(status=status.HTTP_204_NO_CONTENT)

    def _row(self, name: str) -> Tenant:
        row: Tenant = self.only(tenants(of=self.tenant_id).filter(name=checked_name(name, "name", max_length=64)))
        return row
