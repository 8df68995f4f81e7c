"""API keys of tenants. The secret is returned once, on creation; later only its prefix is shown."""

from __future__ import annotations

from typing import ClassVar

from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsAdmin
from api.control.framework.base import SIGNED_IN, ControlView, PageQuery, filtered
from api.control.framework.documented import CHANGED, CREATED, FOUND, operation, page_of
from api.control.framework.references import tenant_named
from controller.models import ApiKey
from controller.selectors.catalogue import api_keys
from controller.services.slo.api_keys import api_key_create, api_key_revoke


class ApiKeyQuery(PageQuery):
    """Filters of the list."""

    tenant = serializers.CharField(max_length=64, required=False, help_text="A tenant's name.")
    active = serializers.BooleanField(
        required=False, allow_null=True, default=None, help_text="True: neither revoked nor expired."
    )


class ApiKeyInput(serializers.Serializer):
    """A new key."""

    tenant = serializers.CharField(max_length=64, help_text="A tenant's name.")
    name = serializers.CharField(max_length=64)
    scopes = serializers.ListField(
        child=serializers.ChoiceField(choices=ApiKey.Scope.choices), min_length=1, max_length=4, required=False
    )
    expires_at = serializers.DateTimeField(allow_null=True, required=False)


class ApiKeyOutput(serializers.ModelSerializer):
    """A key without its secret."""

    tenant = serializers.CharField(source="tenant.name")
    scopes = serializers.ListField(child=serializers.CharField())

    class Meta:
        model = ApiKey
        fields: tuple[str, ...] = (
            "id", "tenant", "name", "prefix", "scopes", "created_at", "expires_at", "revoked_at", "last_used_at",
        )  # fmt: skip
        read_only_fields = fields


class CreatedKeyOutput(ApiKeyOutput):
    """The created key. Only this response contains the secret."""

    secret = serializers.CharField(help_text="Store it now; it cannot be shown again.")

    class Meta(ApiKeyOutput.Meta):
        fields = (*ApiKeyOutput.Meta.fields, "secret")


class ApiKeyList(ControlView):
    """List keys without their secrets; create keys."""

    access: ClassVar = {"GET": SIGNED_IN, "POST": IsAdmin}

    @operation("api_key_list", "List API keys", query=ApiKeyQuery, answer=page_of(ApiKeyOutput))
    def get(self, request: Request) -> Response:
        query = self.query(ApiKeyQuery)
        rows = filtered(api_keys(of=self.tenant_id, usable=query["active"]), query, {"tenant": "tenant__name"})
        return self.page(rows, ("id",), ApiKeyOutput, query)

    @operation(
        "api_key_create", "Create an API key", body=ApiKeyInput, answer=CreatedKeyOutput, status=201, errors=CREATED
    )
    def post(self, request: Request) -> Response:
        data = self.body(ApiKeyInput)
        data["tenant"] = tenant_named(data["tenant"], "tenant")
        made = api_key_create(actor=self.actor, **data)
        shown = {**ApiKeyOutput(made.key).data, "secret": made.secret}
        return Response(shown, status=status.HTTP_201_CREATED, headers={"Cache-Control": "no-store"})


class ApiKeyDetail(ControlView):
    """One key."""

    access: ClassVar = {"GET": SIGNED_IN}

    @operation("api_key_get", "Read an API key", answer=ApiKeyOutput, errors=FOUND)
    def get(self, request: Request, pk: int) -> Response:
        return self.one(self.found(api_keys(of=self.tenant_id), pk), ApiKeyOutput)


class ApiKeyRevoke(ControlView):
    """Revoke a key permanently. Every gateway refuses it within a second."""

    access: ClassVar = {"POST": IsAdmin}

    @operation("api_key_revoke", "Revoke an API key", answer=ApiKeyOutput, errors=CHANGED)
    def post(self, request: Request, pk: int) -> Response:
        api_key_revoke(actor=self.actor, key_id=pk)
        return self.one(self.found(api_keys(), pk), ApiKeyOutput)
