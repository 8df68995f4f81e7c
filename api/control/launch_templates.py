"""Launch templates: how engines are started that Slackline starts itself. A template is a command on a host of the
fleet, so only admins may change one; operators start instances from it."""

from __future__ import annotations

from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsAdmin, IsOperator, IsViewer
from api.control.framework.base import ControlView, PageQuery, filtered
from api.control.framework.documented import CREATED, FOUND, MATCHED, PATCHED, PUT, operation, page_of
from api.control.framework.fields import (
    JsonObjectField,
    NameField,
    SecondsSerializerField,
    VersionedOutput,
    VersionField,
    checked_name,
)
from api.control.framework.preconditions import claimed_version, expected, matched_version, stated_version
from controller.engine.launch_template import ARGUMENTS_MAX, FIELDS, LENGTH_MAX
from controller.models import LaunchTemplate
from controller.models.fleet import Role
from controller.selectors.catalogue import launch_templates
from controller.services.fleet.launch_templates import (
    BACKENDS,
    example,
    launch_template_create,
    launch_template_put,
    launch_template_remove,
    launch_template_resume,
    launch_template_update,
)

NAMED = ", ".join(f"${{{name}}} ({meaning})" for name, meaning in FIELDS.items())


class LaunchTemplateQuery(PageQuery):
    """Filters of the list."""

    name = serializers.CharField(max_length=120, required=False)
    backend = serializers.ChoiceField(choices=BACKENDS, required=False)


class _TemplateFields(serializers.Serializer):
    backend = serializers.ChoiceField(choices=BACKENDS, help_text="Which engine it starts.")
    command = serializers.ListField(
        child=serializers.CharField(max_length=LENGTH_MAX, allow_blank=True, trim_whitespace=False),
        min_length=1,
        max_length=ARGUMENTS_MAX,
        help_text=f"The program and its arguments; no shell reads them. Fields: {NAMED}. Write $$ for a dollar sign.",
    )
    environment = JsonObjectField(
        required=False,
        help_text='Text by variable, with the same fields, or `{"secret": NAME}`: the file NAME in ENGINE_SECRETS_DIR, '
        "which is read when an engine starts. Secrets themselves are refused.",
    )
    roles = serializers.ListField(
        child=serializers.ChoiceField(choices=Role.choices),
        min_length=1,
        max_length=len(Role.choices),
        required=False,
        help_text="Roles of the instances that it starts.",
    )
    spec = JsonObjectField(
        required=False,
        help_text="Facts about its engines that instances get: `kv_role` of vLLM; on a Ray cluster `cluster` (its "
        "name), `resources` (amounts by name) and `labels` (of the node). And `runtime_env`, which Ray sets up on the "
        "node.",
    )
    health_path = serializers.CharField(
        max_length=255, required=False, help_text="Answers 200 once the engine is ready."
    )
    key_variable = serializers.CharField(
        max_length=128,
        required=False,
        allow_blank=True,
        help_text="Environment variable in which the engine takes the API key that it then asks for. Slackline makes "
        "one for each instance. Empty: the engine asks for none.",
    )
    start_limit_s = SecondsSerializerField(required=False, help_text="From the start of its process until it is ready.")


class LaunchTemplateInput(_TemplateFields):
    """A new template; its name never changes."""

    name = NameField(max_length=120)


class LaunchTemplatePut(_TemplateFields):
    """All fields of a template: those that are absent get their default."""


class LaunchTemplatePatch(_TemplateFields):
    """A change; absent fields keep their values."""

    version = VersionField()


class LaunchTemplateVersion(serializers.Serializer):
    """The version that the action is based on; without one it applies to the current version."""

    version = VersionField()


class LaunchTemplateOutput(VersionedOutput):
    """A launch template. `rendered`: its command with example values in place of the fields."""

    command = serializers.ListField(child=serializers.CharField())
    environment = JsonObjectField()
    roles = serializers.ListField(child=serializers.CharField())
    spec = JsonObjectField()
    rendered = serializers.SerializerMethodField()

    class Meta:
        model = LaunchTemplate
        fields = (
            "id", "name", "backend", "roles", "command", "environment", "spec", "health_path", "key_variable",
            "start_limit_s", "rendered", "paused_at", "paused_reason", "version", "created_at", "updated_at",
        )  # fmt: skip
        read_only_fields = fields

    @extend_schema_field(serializers.ListField(child=serializers.CharField()))
    def get_rendered(self, row: LaunchTemplate) -> list[str]:
        return example(row)


class LaunchTemplateList(ControlView):
    """All launch templates, and new ones."""

    access: ClassVar = {"GET": IsViewer, "POST": IsAdmin}

    @operation(
        "launch_template_list",
        "List launch templates",
        query=LaunchTemplateQuery,
        answer=page_of(LaunchTemplateOutput),
    )
    def get(self, request: Request) -> Response:
        query = self.query(LaunchTemplateQuery)
        rows = filtered(launch_templates(), query, {"name": "name", "backend": "backend"})
        return self.page(rows, ("name", "id"), LaunchTemplateOutput, query)

    @operation(
        "launch_template_create",
        "Create a launch template",
        body=LaunchTemplateInput,
        answer=LaunchTemplateOutput,
        status=201,
        errors=CREATED,
    )
    def post(self, request: Request) -> Response:
        row = launch_template_create(actor=self.actor, **self.body(LaunchTemplateInput))
        return self.one(row, LaunchTemplateOutput, status.HTTP_201_CREATED)


class LaunchTemplateDetail(ControlView):
    """One launch template."""

    access: ClassVar = {"GET": IsViewer, "PATCH": IsAdmin, "DELETE": IsAdmin}

    @operation("launch_template_get", "Read a launch template", answer=LaunchTemplateOutput, errors=FOUND)
    def get(self, request: Request, pk: int) -> Response:
        return self.one(self.found(launch_templates(), pk), LaunchTemplateOutput)

    @operation(
        "launch_template_update",
        "Change a launch template",
        body=LaunchTemplatePatch,
        answer=LaunchTemplateOutput,
        errors=PATCHED,
    )
    def patch(self, request: Request, pk: int) -> Response:
        data = self.body(LaunchTemplatePatch, partial=True)
        version = claimed_version(request, data)
        row = launch_template_update(actor=self.actor, template_id=pk, version=version, changes=data)
        return self.one(row, LaunchTemplateOutput)

    @operation("launch_template_remove", "Remove a launch template", status=204, errors=MATCHED)
    def delete(self, request: Request, pk: int) -> Response:
        launch_template_remove(actor=self.actor, template_id=pk, version=matched_version(request))
        return Response(status=status.HTTP_204_NO_CONTENT)


class LaunchTemplateResume(ControlView):
    """Start instances again from a template that was paused because starts from it failed."""

    access: ClassVar = {"POST": IsOperator}

    @operation(
        "launch_template_resume",
        "Resume a launch template",
        body=LaunchTemplateVersion,
        answer=LaunchTemplateOutput,
        errors=MATCHED,
    )
    def post(self, request: Request, pk: int) -> Response:
        version = stated_version(request, self.body(LaunchTemplateVersion))
        self.found(launch_templates(), pk)
        row = launch_template_resume(actor=self.actor, template_id=pk, version=version)
        return self.one(row, LaunchTemplateOutput)


class LaunchTemplateByName(ControlView):
    """The template of this name."""

    access: ClassVar = {"GET": IsViewer, "PUT": IsAdmin, "DELETE": IsAdmin}

    @operation(
        "launch_template_get_by_name",
        "Read a launch template by name",
        answer=LaunchTemplateOutput,
        errors=(400, *FOUND),
    )
    def get(self, request: Request, name: str) -> Response:
        return self.one(self._row(name), LaunchTemplateOutput)

    @operation(
        "launch_template_put",
        "Create or replace a launch template",
        body=LaunchTemplatePut,
        answer=LaunchTemplateOutput,
        errors=PUT,
        created=True,
    )
    def put(self, request: Request, name: str) -> Response:
        name, data = checked_name(name, "name", max_length=120), self.body(LaunchTemplatePut)
        row, created = launch_template_put(actor=self.actor, name=name, values=data, expected=expected(request))
        return self.stored(row, LaunchTemplateOutput, created)

    @operation("launch_template_remove_by_name", "Remove a launch template by name", status=204, errors=MATCHED)
    def delete(self, request: Request, name: str) -> Response:
        launch_template_remove(actor=self.actor, template_id=self._row(name).pk, version=matched_version(request))
        return Response(status=status.HTTP_204_NO_CONTENT)

    def _row(self, name: str) -> Any:
        return self.only(launch_templates().filter(name=checked_name(name, "name", max_length=120)))
