"""SLO classes: the targets of requests of a class, and the share that must attain them."""

from __future__ import annotations

from typing import ClassVar

from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsOperator
from api.control.framework.base import SIGNED_IN, ControlView, PageQuery, filtered
from api.control.framework.documented import CREATED, FOUND, MATCHED, PATCHED, PUT, operation, page_of
from api.control.framework.fields import (
    NameField,
    NumberField,
    SecondsSerializerField,
    VersionedOutput,
    VersionField,
    checked_name,
)
from api.control.framework.preconditions import claimed_version, expected, matched_version
from api.control.framework.references import tenant_named
from controller.models import SLOClass
from controller.selectors.catalogue import slo_classes
from controller.services.slo.slo_classes import (
    slo_class_create,
    slo_class_put,
    slo_class_remove,
    slo_class_update,
)

VALUE_MAX = 1_000_000


class SLOClassQuery(PageQuery):
    """Filters of the list."""

    name = serializers.CharField(max_length=64, required=False)
    tenant = serializers.CharField(
        max_length=64, required=False, allow_blank=True, help_text="A tenant's name; empty: the shared classes."
    )


class _SLOClassFields(serializers.Serializer):
    title = serializers.CharField(max_length=120, allow_blank=True, required=False)
    ttft_s = SecondsSerializerField(help_text="Target for the time to the first token.")
    tpot_s = SecondsSerializerField(help_text="Target for the mean time per output token after the first.")
    deadline_s = SecondsSerializerField(
        allow_null=True, required=False, help_text="Time for the whole answer; null: no deadline."
    )
    waiting_time_s = SecondsSerializerField(
        required=False, help_text="A request that no engine has by then ends with `waiting_time_exceeded`."
    )
    target = NumberField(
        min_value=0.000_001, max_value=1, required=False, help_text="Share of requests that must attain their SLO."
    )
    value = NumberField(
        min_value=0.000_001,
        max_value=VALUE_MAX,
        required=False,
        help_text="Worth of one attained request, relative to other classes.",
    )
    may_defer = serializers.BooleanField(
        required=False, help_text="Serve late instead of refusing if the targets cannot be met."
    )


class SLOClassInput(_SLOClassFields):
    """A new class. Its name and tenant never change."""

    name = NameField(max_length=64)
    tenant = serializers.CharField(
        max_length=64, allow_null=True, required=False, help_text="Owner's name; null: for all tenants."
    )


class SLOClassPut(_SLOClassFields):
    """All fields of a class; absent ones get their default value."""


class SLOClassOwner(serializers.Serializer):
    """Whose class is meant."""

    tenant = serializers.CharField(max_length=64, required=False, help_text="Owner's name; absent: the shared class.")


class SLOClassPatch(_SLOClassFields):
    """A change; absent fields keep their values."""

    version = VersionField()


class SLOClassOutput(VersionedOutput):
    """An SLO class. Times in seconds."""

    tenant = serializers.CharField(source="tenant.name", allow_null=True, default=None)

    class Meta:
        model = SLOClass
        fields = (
            "id", "tenant", "name", "title", "ttft_s", "tpot_s", "deadline_s", "waiting_time_s", "target", "value",
            "may_defer", "version", "created_at", "updated_at",
        )  # fmt: skip
        read_only_fields = fields


class SLOClassList(ControlView):
    """All SLO classes the caller may see, and new ones."""

    access: ClassVar = {"GET": SIGNED_IN, "POST": IsOperator}

    @operation("slo_class_list", "List SLO classes", query=SLOClassQuery, answer=page_of(SLOClassOutput))
    def get(self, request: Request) -> Response:
        query = self.query(SLOClassQuery)
        rows = filtered(slo_classes(of=self.tenant_id), query, {"name": "name", "tenant": "tenant__name"})
        return self.page(rows, ("name", "id"), SLOClassOutput, query)

    @operation(
        "slo_class_create", "Create an SLO class", body=SLOClassInput, answer=SLOClassOutput, status=201, errors=CREATED
    )
    def post(self, request: Request) -> Response:
        data = self.body(SLOClassInput)
        data["tenant"] = tenant_named(data.get("tenant"), "tenant")
        row = slo_class_create(actor=self.actor, **data)
        return self.one(row, SLOClassOutput, status.HTTP_201_CREATED)


class SLOClassDetail(ControlView):
    """One SLO class."""

    access: ClassVar = {"GET": SIGNED_IN, "PATCH": IsOperator, "DELETE": IsOperator}

    @operation("slo_class_get", "Read an SLO class", answer=SLOClassOutput, errors=FOUND)
    def get(self, request: Request, pk: int) -> Response:
        return self.one(self.found(slo_classes(of=self.tenant_id), pk), SLOClassOutput)

    @operation("slo_class_update", "Change an SLO class", body=SLOClassPatch, answer=SLOClassOutput, errors=PATCHED)
    def patch(self, request: Request, pk: int) -> Response:
        data = self.body(SLOClassPatch, partial=True)
        version = claimed_version(request, data)
        row = slo_class_update(actor=self.actor, slo_class_id=pk, version=version, changes=data)
        return self.one(row, SLOClassOutput)

    @operation("slo_class_remove", "Remove an SLO class", status=204, errors=MATCHED)
    def delete(self, request: Request, pk: int) -> Response:
        slo_class_remove(actor=self.actor, slo_class_id=pk, version=matched_version(request))
        return Response(status=status.HTTP_204_NO_CONTENT)


class SLOClassByName(ControlView):
    """The class of this name: the shared one, or with `tenant` that of a tenant."""

    access: ClassVar = {"GET": SIGNED_IN, "PUT": IsOperator, "DELETE": IsOperator}

    @operation(
        "slo_class_get_by_name",
        "Read an SLO class by name",
        query=SLOClassOwner,
        answer=SLOClassOutput,
        errors=(400, *FOUND),
    )
    def get(self, request: Request, name: str) -> Response:
        return self.one(self._row(name), SLOClassOutput)

    @operation(
        "slo_class_put",
        "Create or replace an SLO class",
        query=SLOClassOwner,
        body=SLOClassPut,
        answer=SLOClassOutput,
        errors=PUT,
        created=True,
    )
    def put(self, request: Request, name: str) -> Response:
        name, owner = self._key(name)
        data, tenant = self.body(SLOClassPut), tenant_named(owner, "tenant")
        row, created = slo_class_put(
            actor=self.actor, name=name, tenant=tenant, values=data, expected=expected(request)
        )
        return self.stored(row, SLOClassOutput, created)

    @operation(
        "slo_class_remove_by_name", "Remove an SLO class by name", query=SLOClassOwner, status=204, errors=MATCHED
    )
    def delete(self, request: Request, name: str) -> Response:
        slo_class_remove(actor=self.actor, slo_class_id=self._row(name).pk, version=matched_version(request))
        return Response(status=status.HTTP_204_NO_CONTENT)

    def _key(self, name: str) -> tuple[str, str | None]:
        return checked_name(name, "name", max_length=64), self.query(SLOClassOwner).get("tenant")

    def _row(self, name: str) -> SLOClass:
        name, owner = self._key(name)
        rows = slo_classes(of=self.tenant_id).filter(name=name, tenant__name=owner)
        row: SLOClass = self.only(rows)
        return row
