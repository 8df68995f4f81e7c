"""Instances: callers set the desired state; a provisioner acts on it and reports the observed state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar

from django.conf import settings
from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsOperator, IsViewer
from api.control.actions import ActionOutput
from api.control.framework.base import ControlView, PageQuery, filtered
from api.control.framework.documented import CREATED, FOUND, MATCHED, PATCHED, PUT, operation, page_of
from api.control.framework.errors import LogUnavailable
from api.control.framework.fields import BaseUrlField, JsonObjectField, NumberField, VersionedOutput, VersionField
from api.control.framework.preconditions import claimed_version, expected, matched_version, stated_version
from api.control.framework.references import host_named, model_named, template_named
from controller.core.types import DEFAULT_MAX_NUM_SEQS
from controller.models import Action, Instance
from controller.models.base import INSTANCE_ID
from controller.models.fleet import Role
from controller.scale.provisioning import DECLARED, abilities
from controller.selectors.catalogue import instances
from controller.services.fleet.actions import weights_load_order
from controller.services.fleet.instances import (
    instance_create,
    instance_drain,
    instance_remove,
    instance_stop,
    instance_undrain,
    instance_update,
)
from controller.services.fleet.launches import instance_join, instance_put
from controller.services.fleet.role_switches import role_order
from controller.services.fleet.sleeping import LEVELS, sleep_order, wake_order
from controller.wording.values import BACKEND_NAMES

BACKENDS = tuple(BACKEND_NAMES)
NOT_STARTED = (
    "is started from a launch template: name one. A server that you start yourself is registered with provisioner "
    "`static` and its URL."
)
PROVISIONERS = tuple(DECLARED)
SOURCES = ("engine", "host", "disk")
SOURCES_MAX = 8  # of one weight load; engines have the same limit
LOOKUPS = {
    "model": "model__name",
    "host": "host__name",
    "role": "role",
    "desired_state": "desired_state",
    "observed_state": "observed_state",
}


class InstanceQuery(PageQuery):
    """Filters of the list."""

    model = serializers.CharField(max_length=120, required=False, help_text="A model's name.")
    host = serializers.CharField(
        max_length=120, required=False, allow_blank=True, help_text="A host's name; empty: instances without a host."
    )
    role = serializers.ChoiceField(choices=Role.choices, required=False)
    desired_state = serializers.ChoiceField(choices=Instance.Desired.choices, required=False)
    observed_state = serializers.ChoiceField(choices=Instance.Observed.choices, required=False)
    live = serializers.BooleanField(
        required=False,
        allow_null=True,
        default=None,
        help_text="True: instances that should run or still do; false: all others.",
    )


class _InstanceFields(serializers.Serializer):
    host = serializers.CharField(max_length=120, allow_null=True, required=False, help_text="A host's name.")
    device_kind = serializers.CharField(max_length=64, allow_blank=True, required=False)
    tp = serializers.IntegerField(min_value=1, max_value=1024, required=False, help_text="Tensor parallel degree.")
    max_num_seqs = serializers.IntegerField(
        min_value=1,
        max_value=100_000,
        required=False,
        allow_null=True,
        help_text="Most sequences that run at once. null, the default of a `static` instance: as many as its "
        "server reports, or "
        f"{DEFAULT_MAX_NUM_SEQS} if it reports nothing.",
    )
    unit_cost = NumberField(
        min_value=0, max_value=1e6, required=False, help_text="Cost of one second of this instance."
    )
    key_name = serializers.CharField(
        max_length=64,
        required=False,
        allow_blank=True,
        validators=[INSTANCE_ID],
        help_text="Name of the file in ENGINE_KEYS_DIR with the API key that the server of a `static` instance "
        "asks for.",
    )
    spec = JsonObjectField(
        required=False,
        help_text="Options of the engine. Of an instance with a template: `folder`, what its engine loads, and on a "
        "Ray cluster `cluster`, `resources` and `labels` (default: those of the template). For a vLLM server "
        "`kv_role`, as it was started: with `kv_both` the scaler may change its role between prefill and decode.",
    )


class InstanceInput(_InstanceFields):
    """A new instance: one that its provisioner starts, or an endpoint that runs already (`static`, with its url)."""

    needs: ClassVar[tuple[str, ...]] = ("id", "url")  # of a static instance

    id = serializers.CharField(
        max_length=63, validators=[INSTANCE_ID], required=False, help_text="Generated if absent."
    )
    model = serializers.CharField(max_length=120, help_text="A model's name.")
    backend = serializers.ChoiceField(choices=BACKENDS)
    provisioner = serializers.ChoiceField(choices=PROVISIONERS)
    url = BaseUrlField(max_length=255, required=False, help_text="URL of a `static` instance.")
    template = serializers.CharField(
        max_length=120,
        required=False,
        allow_null=True,
        help_text="Name of the launch template that it is started from. Required of an instance that Slackline starts, "
        "unless it is a reference engine.",
    )
    role = serializers.ChoiceField(choices=Role.choices, required=False)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if abilities(attrs["provisioner"]).registers:
            missing = {name: ["A static instance needs it."] for name in self.needs if name not in attrs}
            if missing:
                raise serializers.ValidationError(missing)
            if attrs.pop("template", None) is not None:
                raise serializers.ValidationError({"template": ["Only for an instance that Slackline starts."]})
        elif "url" in attrs:
            raise serializers.ValidationError(
                {"url": ["Only for provisioner `static`; other provisioners set the URL themselves."]}
            )
        elif attrs.pop("key_name", ""):
            raise serializers.ValidationError({"key_name": ["Only for provisioner `static`."]})
        elif attrs.get("template") is None and attrs["backend"] != "reference":
            raise serializers.ValidationError({"template": [f"{BACKEND_NAMES[attrs['backend']]} {NOT_STARTED}"]})
        return attrs


class InstancePut(InstanceInput):
    """All fields of an instance; absent ones get their default value. Model, backend, provisioner and URL cannot be
    changed, and the role is changed by `set-role`."""

    id = None  # in the address
    needs: ClassVar[tuple[str, ...]] = ("url",)


class InstancePatch(_InstanceFields):
    """A change; absent fields keep their values. The desired state is changed by actions."""

    version = VersionField()


class InstanceActionSerializer(serializers.Serializer):
    """The version that the action is based on; without one it applies to the current version."""

    version = VersionField()


class InstanceDesired(InstanceActionSerializer):
    """The state that the instance should be in."""

    desired_state = serializers.ChoiceField(choices=Instance.Desired.choices)


class InstanceRole(InstanceActionSerializer):
    """The stage of requests that the instance should serve."""

    role = serializers.ChoiceField(choices=Role.choices)


class InstanceOutput(VersionedOutput):
    """An instance: its desired state, its observed state, and when it was observed."""

    model = serializers.CharField(source="model.name")
    host = serializers.CharField(source="host.name", allow_null=True, default=None)
    template = serializers.CharField(source="template.name", allow_null=True, default=None)
    start_steps = JsonObjectField(help_text="When its engine reached each step of its start, in epoch seconds.")
    max_num_seqs = serializers.IntegerField(source="configured_seqs", allow_null=True, read_only=True)
    url = serializers.CharField(source="shown_url", read_only=True)
    spec = JsonObjectField()

    class Meta:
        model = Instance
        fields = (
            "id", "model", "host", "backend", "provisioner", "template", "url", "role", "device_kind", "tp",
            "max_num_seqs", "unit_cost", "spec", "key_name", "weights", "sleep_level", "desired_state",
            "observed_state", "generation", "observed_generation", "desired_at", "observed_at", "ready_at",
            "stopped_at", "error", "start_steps", "version", "created_at", "updated_at",
        )  # fmt: skip
        read_only_fields = fields


class InstanceLogOutput(serializers.Serializer):
    """The end of what the engine of an instance printed, at most 64 KiB."""

    text = serializers.CharField(
        help_text="Empty if nothing of it is kept on the machine of the console or on its cluster."
    )
    truncated = serializers.BooleanField(help_text="Whether there are earlier lines.")
    written_at = serializers.DateTimeField(allow_null=True, help_text="When the last line was written; null: no log.")


class WeightSourceSerializer(serializers.Serializer):
    """One source of weights."""

    kind = serializers.ChoiceField(choices=SOURCES)
    url = BaseUrlField(
        max_length=255, required=False, help_text="URL of the engine to copy from; only for the kind `engine`."
    )

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if (attrs["kind"] == "engine") != ("url" in attrs):
            raise serializers.ValidationError({"url": ["Required for kind `engine`, not allowed for others."]})
        return attrs


class InstanceLoadInput(InstanceActionSerializer):
    """Where the weights may come from, in the order to try; absent: chosen by topology and load."""

    sources = WeightSourceSerializer(many=True, required=False, allow_empty=False, max_length=SOURCES_MAX)


class InstanceSleepInput(InstanceActionSerializer):
    """Sleep level: 1 keeps a copy of the weights in host memory, 2 does not."""

    level = serializers.ChoiceField(choices=LEVELS, required=False, default=1)


class InstanceList(ControlView):
    """List instances; create instances."""

    access: ClassVar = {"GET": IsViewer, "POST": IsOperator}

    @operation("instance_list", "List instances", query=InstanceQuery, answer=page_of(InstanceOutput))
    def get(self, request: Request) -> Response:
        query = self.query(InstanceQuery)
        rows = filtered(instances(live=query["live"]), query, LOOKUPS)
        return self.page(rows, ("id",), InstanceOutput, query)

    @operation(
        "instance_create", "Create an instance", body=InstanceInput, answer=InstanceOutput, status=201, errors=CREATED
    )
    def post(self, request: Request) -> Response:
        data = _with_host(self.body(InstanceInput))
        data["model"] = model_named(data["model"], "model")
        data = _with_template(data)
        if abilities(data["provisioner"]).registers:
            del data["provisioner"]
            row = instance_join(actor=self.actor, **data)
        else:
            row = instance_create(actor=self.actor, **data)
        return self.one(row, InstanceOutput, status.HTTP_201_CREATED)


class InstanceDetail(ControlView):
    """One instance."""

    access: ClassVar = {"GET": IsViewer, "PUT": IsOperator, "PATCH": IsOperator, "DELETE": IsOperator}

    @operation("instance_get", "Read an instance", answer=InstanceOutput, errors=FOUND)
    def get(self, request: Request, pk: str) -> Response:
        return self.one(self.found(instances(), pk), InstanceOutput)

    @operation("instance_update", "Change an instance", body=InstancePatch, answer=InstanceOutput, errors=PATCHED)
    def patch(self, request: Request, pk: str) -> Response:
        data = _with_host(self.body(InstancePatch, partial=True))
        version = claimed_version(request, data)
        row = instance_update(actor=self.actor, instance_id=pk, version=version, changes=data)
        return self.one(row, InstanceOutput)

    @operation(
        "instance_put",
        "Create or replace an instance",
        body=InstancePut,
        answer=InstanceOutput,
        errors=PUT,
        created=True,
    )
    def put(self, request: Request, pk: str) -> Response:
        own = InstanceInput().fields["id"]
        try:
            own.run_validation(pk)
        except serializers.ValidationError as error:
            raise serializers.ValidationError({"id": error.detail}) from error
        data = _with_host(self.body(InstancePut))
        data["model"] = model_named(data["model"], "model")
        data = _with_template(data)
        row, created = instance_put(actor=self.actor, instance_id=pk, values=data, expected=expected(request))
        return self.stored(self.found(instances(), row.pk), InstanceOutput, created)

    @operation("instance_remove", "Forget a stopped or failed instance", status=204, errors=MATCHED)
    def delete(self, request: Request, pk: str) -> Response:
        instance_remove(actor=self.actor, instance_id=pk, version=matched_version(request))
        return Response(status=status.HTTP_204_NO_CONTENT)


class InstanceLog(ControlView):
    """What the engine of an instance printed, if Slackline started it: on the machine of the console, or on a cluster
    that the console can reach."""

    access: ClassVar = {"GET": IsOperator}

    @operation("instance_log", "Read the log of an instance", answer=InstanceLogOutput, errors=FOUND)
    def get(self, request: Request, pk: str) -> Response:
        from workers.provisioners.logs import log_of  # what starts engines is large, and other calls do not need it

        row = self.found(instances(), pk)
        try:
            log = log_of(row.source, row.pk, settings.DATA_DIR)
        except OSError as error:
            raise LogUnavailable(f"The log cannot be read: {error.strerror or error}.") from error
        if log is None:
            return Response({"text": "", "truncated": False, "written_at": None})
        written_at = datetime.fromtimestamp(log.written_at, UTC)
        return Response(InstanceLogOutput({"text": log.text, "truncated": log.cut, "written_at": written_at}).data)


class _InstanceActionView(ControlView):
    """An action on one instance."""

    access: ClassVar = {"POST": IsOperator}

    def current(self) -> Mapping[str, Any]:
        return InstanceOutput(self.found(instances(), self.kwargs["pk"])).data


class _InstanceStateView(_InstanceActionView):
    """Sets the desired state of one instance. Idempotent."""

    def set_state(self, service: Callable[..., Instance], pk: str, data: dict[str, Any]) -> Response:
        service(actor=self.actor, instance_id=pk, version=stated_version(self.request, data))
        return self.one(self.found(instances(), pk), InstanceOutput)


class InstanceDrain(_InstanceStateView):
    """Send the instance no new requests and let it finish those that are running."""

    @operation(
        "instance_drain", "Drain an instance", body=InstanceActionSerializer, answer=InstanceOutput, errors=MATCHED
    )
    def post(self, request: Request, pk: str) -> Response:
        return self.set_state(instance_drain, pk, self.body(InstanceActionSerializer))


class InstanceStop(_InstanceStateView):
    """Stop the instance immediately and permanently, even if requests are running."""

    @operation(
        "instance_stop", "Stop an instance", body=InstanceActionSerializer, answer=InstanceOutput, errors=MATCHED
    )
    def post(self, request: Request, pk: str) -> Response:
        return self.set_state(instance_stop, pk, self.body(InstanceActionSerializer))


class InstanceSetRole(_InstanceActionView):
    """Send the instance only requests of this stage from now on. Running requests finish there.

    An engine that has to switch its own role (SGLang) is drained first; its role changes when the action `role_switch`
    ends.
    """

    @operation(
        "instance_set_role", "Set the role of an instance", body=InstanceRole, answer=InstanceOutput, errors=MATCHED
    )
    def post(self, request: Request, pk: str) -> Response:
        data = self.body(InstanceRole)
        version = stated_version(self.request, data)
        role_order(actor=self.actor, instance_id=pk, role=data["role"], version=version)
        return self.one(self.found(instances(), pk), InstanceOutput)


class _InstanceOrderView(_InstanceActionView):
    """Orders an action on an instance and returns it. Idempotent: an open action of the same kind is returned."""

    def order(self, service: Callable[..., Action], pk: str, data: dict[str, Any]) -> Response:
        version = stated_version(self.request, data)
        row = service(actor=self.actor, instance_id=pk, version=version, **data)
        return self.one(row, ActionOutput, status.HTTP_202_ACCEPTED)


ordered = partial(operation, answer=ActionOutput, status=202, errors=MATCHED)


class InstanceLoad(_InstanceOrderView):
    """Load weights on a warm instance. The response is the action that loads them; it ends with a decision."""

    @ordered("instance_load", "Load the weights of an instance", body=InstanceLoadInput)
    def post(self, request: Request, pk: str) -> Response:
        return self.order(weights_load_order, pk, self.body(InstanceLoadInput))


class InstanceSleep(_InstanceOrderView):
    """Release the device memory and keep the process. Running requests finish first; no new ones are sent."""

    @ordered("instance_sleep", "Put an instance to sleep", body=InstanceSleepInput)
    def post(self, request: Request, pk: str) -> Response:
        return self.order(sleep_order, pk, self.body(InstanceSleepInput))


class InstanceWake(_InstanceOrderView):
    """Wake a sleeping instance. It gets requests once all of its weights are back."""

    @ordered("instance_wake", "Wake an instance", body=InstanceActionSerializer)
    def post(self, request: Request, pk: str) -> Response:
        return self.order(wake_order, pk, self.body(InstanceActionSerializer))


class InstanceDesiredState(_InstanceStateView):
    """Set the desired state: draining, running (also after a drain), or stopped permanently."""

    SERVICES: ClassVar = {
        Instance.Desired.RUNNING: instance_undrain,
        Instance.Desired.DRAINING: instance_drain,
        Instance.Desired.STOPPED: instance_stop,
    }

    @operation(
        "instance_set_desired_state",
        "Set the desired state of an instance",
        body=InstanceDesired,
        answer=InstanceOutput,
        errors=MATCHED,
    )
    def post(self, request: Request, pk: str) -> Response:
        data = self.body(InstanceDesired)
        return self.set_state(self.SERVICES[data["desired_state"]], pk, data)


def _with_host(data: dict[str, Any]) -> dict[str, Any]:
    """The data with the host's row in place of its name."""
    if "host" in data:
        data["host"] = host_named(data["host"], "host")
    return data


def _with_template(data: dict[str, Any]) -> dict[str, Any]:
    """The data with the template's row in place of its name. The backend must be the template's."""
    if "template" in data:
        data["template"] = template = template_named(data["template"], "template")
        if template is not None and data["backend"] != template.backend:
            raise serializers.ValidationError({"backend": [f"The template {template} starts {template.backend}."]})
    return data
