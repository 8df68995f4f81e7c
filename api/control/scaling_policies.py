"""Scaling policies: the number of instances of a model and role, and when to change it (HyperFlexis Alg. 3)."""

from __future__ import annotations

from datetime import timedelta
from typing import ClassVar

from django.utils import timezone
from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsOperator, IsViewer
from api.control.framework.base import ControlView, PageQuery, filtered
from api.control.framework.documented import CREATED, FOUND, MATCHED, PATCHED, PUT, operation, page_of
from api.control.framework.fields import NumberField, VersionedOutput, VersionField, checked_name
from api.control.framework.preconditions import claimed_version, expected, matched_version, stated_version
from api.control.framework.references import model_named
from controller.models import ScalingPolicy
from controller.models.fleet import Role
from controller.selectors.catalogue import scaling_policies
from controller.services.fleet.scaling_policies import (
    HELD_MAX,
    LONGEST_HOLD,
    scaling_policy_create,
    scaling_policy_hold,
    scaling_policy_put,
    scaling_policy_release,
    scaling_policy_remove,
    scaling_policy_update,
)

INSTANCES_MAX = 1000
LOAD_MAX = 100
SECONDS_MAX = 86_400


class ScalingPolicyQuery(PageQuery):
    """Filters of the list."""

    model = serializers.CharField(max_length=120, required=False, help_text="A model's name.")
    enabled = serializers.BooleanField(required=False, allow_null=True, default=None)


class _ScalingFields(serializers.Serializer):
    min_instances = serializers.IntegerField(min_value=0, max_value=INSTANCES_MAX, required=False)
    max_instances = serializers.IntegerField(min_value=1, max_value=INSTANCES_MAX, required=False)
    upper = NumberField(
        min_value=0,
        max_value=LOAD_MAX,
        required=False,
        help_text="Load above which to scale out; 1.0 is a fully used fleet.",
    )
    lower = NumberField(min_value=0, max_value=LOAD_MAX, required=False)
    sustain_s = NumberField(
        min_value=0,
        max_value=SECONDS_MAX,
        required=False,
        help_text="How long load must stay below `lower` before one instance is drained.",
    )
    cooldown_s = NumberField(
        min_value=0, max_value=SECONDS_MAX, required=False, help_text="Minimum time between two changes."
    )
    interval_s = NumberField(min_value=1, max_value=60, required=False, help_text="Time between two evaluations.")
    warm = serializers.IntegerField(
        min_value=0,
        max_value=INSTANCES_MAX,
        required=False,
        allow_null=True,
        help_text="Warm spares: processes without weights that a scale-out uses first. They count toward cost. "
        "null: as "
        "many as free devices allow, none where no devices are described.",
    )
    sleep_level = serializers.IntegerField(
        min_value=0,
        max_value=2,
        required=False,
        help_text="How to scale in. 0: stop; 1: sleep, keep weights in host memory; 2: sleep, discard weights.",
    )
    enabled = serializers.BooleanField(required=False)


class ScalingPolicyInput(_ScalingFields):
    """A new policy; its model and role never change."""

    model = serializers.CharField(max_length=120, help_text="A model's name.")
    role = serializers.ChoiceField(choices=Role.choices, required=False)


class ScalingPolicyPut(_ScalingFields):
    """All fields of a policy; absent ones get their default value, except `enabled`, which keeps its value."""


class ScalingPolicyRole(serializers.Serializer):
    """The stage of requests whose instances the policy counts."""

    role = serializers.ChoiceField(choices=Role.choices, required=False, default=Role.COLLOCATED)


class ScalingPolicyPatch(_ScalingFields):
    """A change; absent fields keep their values."""

    version = VersionField()


class ScalingPolicyHoldInput(serializers.Serializer):
    """How many instances by hand, for how long and why."""

    instances = serializers.IntegerField(min_value=1, max_value=HELD_MAX)
    seconds = serializers.IntegerField(
        min_value=60, max_value=int(LONGEST_HOLD.total_seconds()), help_text="After that it scales by load again."
    )
    reason = serializers.CharField(max_length=200)
    version = VersionField()


class ScalingPolicyOutput(VersionedOutput):
    """A scaling policy. Seconds."""

    model = serializers.CharField(source="model.name")

    class Meta:
        model = ScalingPolicy
        fields = (
            "id", "model", "role", "min_instances", "max_instances", "upper", "lower", "sustain_s",
            "cooldown_s", "interval_s", "warm", "sleep_level", "enabled", "held_instances",
            "held_until", "held_for", "version", "created_at", "updated_at",
        )  # fmt: skip
        read_only_fields = fields


class ScalingPolicyList(ControlView):
    """All scaling policies the caller may see, and new ones."""

    access: ClassVar = {"GET": IsViewer, "POST": IsOperator}

    @operation(
        "scaling_policy_list", "List scaling policies", query=ScalingPolicyQuery, answer=page_of(ScalingPolicyOutput)
    )
    def get(self, request: Request) -> Response:
        query = self.query(ScalingPolicyQuery)
        rows = filtered(scaling_policies(), query, {"model": "model__name", "enabled": "enabled"})
        return self.page(rows, ("id",), ScalingPolicyOutput, query)

    @operation(
        "scaling_policy_create",
        "Create a scaling policy",
        body=ScalingPolicyInput,
        answer=ScalingPolicyOutput,
        status=201,
        errors=CREATED,
    )
    def post(self, request: Request) -> Response:
        data = self.body(ScalingPolicyInput)
        data["model"] = model_named(data["model"], "model")
        row = scaling_policy_create(actor=self.actor, **data)
        return self.one(row, ScalingPolicyOutput, status.HTTP_201_CREATED)


class ScalingPolicyDetail(ControlView):
    """One scaling policy."""

    access: ClassVar = {"GET": IsViewer, "PATCH": IsOperator, "DELETE": IsOperator}

    @operation("scaling_policy_get", "Read a scaling policy", answer=ScalingPolicyOutput, errors=FOUND)
    def get(self, request: Request, pk: int) -> Response:
        return self.one(self.found(scaling_policies(), pk), ScalingPolicyOutput)

    @operation(
        "scaling_policy_update",
        "Change a scaling policy",
        body=ScalingPolicyPatch,
        answer=ScalingPolicyOutput,
        errors=PATCHED,
    )
    def patch(self, request: Request, pk: int) -> Response:
        data = self.body(ScalingPolicyPatch, partial=True)
        version = claimed_version(request, data)
        row = scaling_policy_update(actor=self.actor, policy_id=pk, version=version, changes=data)
        return self.one(row, ScalingPolicyOutput)

    @operation("scaling_policy_remove", "Remove a scaling policy", status=204, errors=MATCHED)
    def delete(self, request: Request, pk: int) -> Response:
        scaling_policy_remove(actor=self.actor, policy_id=pk, version=matched_version(request))
        return Response(status=status.HTTP_204_NO_CONTENT)


class ScalingPolicyHold(ControlView):
    """Scaling by hand: exactly so many instances until a time, whatever the load is."""

    access: ClassVar = {"POST": IsOperator, "DELETE": IsOperator}

    @operation(
        "scaling_policy_hold",
        "Scale by hand",
        body=ScalingPolicyHoldInput,
        answer=ScalingPolicyOutput,
        errors=MATCHED,
    )
    def post(self, request: Request, pk: int) -> Response:
        data = self.body(ScalingPolicyHoldInput)
        version = stated_version(request, data)
        until = timezone.now() + timedelta(seconds=data.pop("seconds"))
        row = scaling_policy_hold(actor=self.actor, policy_id=pk, version=version, until=until, **data)
        return self.one(row, ScalingPolicyOutput)

    @operation("scaling_policy_release", "Scale by load again", answer=ScalingPolicyOutput, errors=MATCHED)
    def delete(self, request: Request, pk: int) -> Response:
        row = scaling_policy_release(actor=self.actor, policy_id=pk, version=matched_version(request))
        return self.one(row, ScalingPolicyOutput)


class ScalingPolicyByModel(ControlView):
    """The policy of a model and role."""

    access: ClassVar = {"GET": IsViewer, "PUT": IsOperator, "DELETE": IsOperator}

    @operation(
        "scaling_policy_get_by_model",
        "Read the scaling policy of a model and role",
        query=ScalingPolicyRole,
        answer=ScalingPolicyOutput,
        errors=(400, *FOUND),
    )
    def get(self, request: Request, model: str) -> Response:
        return self.one(self._row(model), ScalingPolicyOutput)

    @operation(
        "scaling_policy_put",
        "Create or replace the scaling policy of a model and role",
        query=ScalingPolicyRole,
        body=ScalingPolicyPut,
        answer=ScalingPolicyOutput,
        errors=PUT,
        created=True,
    )
    def put(self, request: Request, model: str) -> Response:
        name, role = self._key(model)
        data, served = self.body(ScalingPolicyPut), model_named(name, "model")
        row, created = scaling_policy_put(
            actor=self.actor, model=served, role=role, values=data, expected=expected(request)
        )
        return self.stored(row, ScalingPolicyOutput, created)

    @operation(
        "scaling_policy_remove_by_model",
        "Remove the scaling policy of a model and role",
        query=ScalingPolicyRole,
        status=204,
        errors=MATCHED,
    )
    def delete(self, request: Request, model: str) -> Response:
        scaling_policy_remove(actor=self.actor, policy_id=self._row(model).pk, version=matched_version(request))
        return Response(status=status.HTTP_204_NO_CONTENT)

    def _key(self, model: str) -> tuple[str, str]:
        return checked_name(model, "model", max_length=120), self.query(ScalingPolicyRole)["role"]

    def _row(self, model: str) -> ScalingPolicy:
        name, role = self._key(model)
        row: ScalingPolicy = self.only(scaling_policies().filter(model__name=name, role=role))
        return row
