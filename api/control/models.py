"""Served models: the names that clients may send as `model`, and the properties of each."""

from __future__ import annotations

from typing import Any, ClassVar

from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsAdmin
from api.control.framework.base import SIGNED_IN, ControlView, PageQuery, filtered
from api.control.framework.documented import CREATED, FOUND, MATCHED, PATCHED, operation, page_of
from api.control.framework.fields import NameField, NumberField, VersionedOutput, VersionField
from api.control.framework.preconditions import claimed_version, matched_version
from controller.models import ServedModel
from controller.selectors.catalogue import served_models
from controller.services.fleet.served_models import served_model_create, served_model_remove, served_model_update

ALIASES_MAX = 20
CONTEXT_MAX = 10_000_000


class ServedModelQuery(PageQuery):
    """Filters of the list."""

    name = serializers.CharField(max_length=120, required=False)


class _ServedModelFields(serializers.Serializer):
    aliases = serializers.ListField(child=NameField(max_length=120), max_length=ALIASES_MAX, required=False)
    context_tokens = serializers.IntegerField(min_value=1, max_value=CONTEXT_MAX, required=False)
    chars_per_token = NumberField(
        min_value=0.1,
        max_value=100,
        required=False,
        help_text="Estimate of prompt lengths until requests have shown the real ratio.",
    )
    tokenizer = serializers.CharField(
        max_length=500,
        allow_blank=True,
        required=False,
        help_text="Absolute path of a tokenizer.json, or of its folder, on the gateways' machines. "
        "Empty in answers to a tenant's key.",
    )


class ServedModelInput(_ServedModelFields):
    """A new model; its name never changes."""

    name = NameField(max_length=120)


class ServedModelPatch(_ServedModelFields):
    """A change; absent fields keep their values."""

    version = VersionField()


class ServedModelOutput(VersionedOutput):
    """A served model."""

    aliases = serializers.ListField(child=serializers.CharField())

    class Meta:
        model = ServedModel
        fields = (
            "id", "name", "aliases", "context_tokens", "chars_per_token", "tokenizer", "version",
            "created_at", "updated_at",
        )  # fmt: skip
        read_only_fields = fields

    def to_representation(self, row: ServedModel) -> dict[str, Any]:
        shown: dict[str, Any] = super().to_representation(row)
        return shown if self.context.get("people", True) else {**shown, "tokenizer": ""}


class ServedModelList(ControlView):
    """All models the caller may see, and new ones."""

    access: ClassVar = {"GET": SIGNED_IN, "POST": IsAdmin}

    @operation("served_model_list", "List models", query=ServedModelQuery, answer=page_of(ServedModelOutput))
    def get(self, request: Request) -> Response:
        query = self.query(ServedModelQuery)
        rows = filtered(served_models(), query, {"name": "name"})
        return self.page(rows, ("name",), ServedModelOutput, query)

    @operation(
        "served_model_create",
        "Create a model",
        body=ServedModelInput,
        answer=ServedModelOutput,
        status=201,
        errors=CREATED,
    )
    def post(self, request: Request) -> Response:
        data = self.body(ServedModelInput)
        row = served_model_create(actor=self.actor, **data)
        return self.one(row, ServedModelOutput, status.HTTP_201_CREATED)


class ServedModelDetail(ControlView):
    """One model."""

    access: ClassVar = {"GET": SIGNED_IN, "PATCH": IsAdmin, "DELETE": IsAdmin}

    @operation("served_model_get", "Read a model", answer=ServedModelOutput, errors=FOUND)
    def get(self, request: Request, pk: int) -> Response:
        return self.one(self.found(served_models(), pk), ServedModelOutput)

    @operation("served_model_update", "Change a model", body=ServedModelPatch, answer=ServedModelOutput, errors=PATCHED)
    def patch(self, request: Request, pk: int) -> Response:
        data = self.body(ServedModelPatch, partial=True)
        version = claimed_version(request, data)
        row = served_model_update(actor=self.actor, model_id=pk, version=version, changes=data)
        return self.one(row, ServedModelOutput)

    @operation("served_model_remove", "Remove a model", status=204, errors=MATCHED)
    def delete(self, request: Request, pk: int) -> Response:
        served_model_remove(actor=self.actor, model_id=pk, version=matched_version(request))
        return Response(status=status.HTTP_204_NO_CONTENT)
