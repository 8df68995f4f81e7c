"""How operations are described in the OpenAPI document: what each does, who may call it, and the errors all share."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from drf_spectacular.openapi import AutoSchema
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework import serializers

from api.control.access.permissions import IsAdmin
from api.control.access.scopes import scopes_for

ERRORS = {
    400: "A field is wrong; `error.fields` names it.",
    401: "The caller is not signed in, or the API key is not valid.",
    403: "The caller's role, or the scopes of its key or token, do not allow this.",
    404: "The object does not exist or belongs to another tenant.",
    409: "The change conflicts with stored data.",
    412: "`If-Match` names another version than the stored one, or `If-None-Match: *` was sent and the object exists. "
    "`error` has the stored object and the differences.",
    428: "Neither `If-Match` nor `version` says on which version the change is based.",
    429: "Too many requests; see `Retry-After`.",
    503: "PostgreSQL, Redis or the log of an engine cannot be read; see `Retry-After`.",
}

LISTED = (400, 401, 403, 429, 503)
CREATED = (400, 401, 403, 409, 429, 503)
FOUND = (401, 403, 404, 429, 503)
CHANGED = (400, 401, 403, 404, 409, 429, 503)
MATCHED = (*CHANGED, 412)  # takes If-Match
PATCHED = (*MATCHED, 428)  # requires it
PUT = (400, 401, 403, 409, 412, 429, 503)


class ErrorBody(serializers.Serializer):
    """What went wrong."""

    code = serializers.CharField(help_text="For programs; a code keeps its meaning.")
    message = serializers.CharField(help_text="What went wrong, for people.")
    fields_ = serializers.DictField(
        child=serializers.ListField(child=serializers.CharField()),
        help_text="Messages by the name of the field that they are about.",
    )

    def get_fields(self) -> dict[str, serializers.Field]:
        """Renames `fields_` to `fields`, which is a name of Django REST framework and cannot be declared directly."""
        found = super().get_fields()
        found["fields"] = found.pop("fields_")
        return found


class ErrorOutput(serializers.Serializer):
    """Every error has this shape."""

    error = ErrorBody()


class DifferenceOutput(serializers.Serializer):
    """A field in which the stored object differs from the body of the call."""

    field = serializers.CharField()
    stored = serializers.JSONField(allow_null=True)
    sent = serializers.JSONField(allow_null=True)


class StaleBody(ErrorBody):
    """What is stored instead of what the call expected."""

    current = serializers.DictField(allow_null=True, required=False, help_text="The stored object, with its `etag`.")
    differences = DifferenceOutput(many=True, required=False)


class StaleOutput(serializers.Serializer):
    """The error of a call whose `If-Match` or `If-None-Match` does not hold."""

    error = StaleBody()


IF_MATCH = OpenApiParameter(
    "If-Match",
    location=OpenApiParameter.HEADER,
    description="ETag of the version on which the call is based, or `*` for any version.",
)
IF_NONE_MATCH = OpenApiParameter(
    "If-None-Match", location=OpenApiParameter.HEADER, enum=["*"], description="Only create: 412 if the object exists."
)

# What a method of a resource with several does, by method and by whether the address names one object.
DOES = {
    ("GET", False): "One page of the list.",
    ("GET", True): "Its `ETag` is the version to send as `If-Match`.",
    ("PUT", True): "Creates the object (201) or replaces it (200). Fields that are absent get their default value. "
    "The same call again changes nothing.",
    ("PATCH", True): "Changes the fields in the body and keeps all others. Needs the version that it is based on, as "
    "`If-Match` or `version`.",
    ("DELETE", True): "With `If-Match`, only if that version is still the stored one.",
}
ROWS = re.compile(r"/api/v1/[a-z-]+(/\{id\})?")
TENANT = "A tenant's API key with the scope `read` may call it too, and gets what concerns the tenant alone."


class OperationSchema(AutoSchema):
    """Describes each method for itself: the docstring of a view is about all of its methods."""

    def get_description(self) -> str:
        return " ".join(part for part in (self._does(), self._who()) if part)

    def _does(self) -> str:
        methods = [name for name in ("get", "post", "put", "patch", "delete") if hasattr(self.view, name)]
        about: str = super().get_description().strip()
        shared = len(methods) > 1 and ROWS.fullmatch(self.path)  # a list and its additions, or one object
        if shared or about.startswith("One "):
            about = ""
        does = DOES.get((self.method, "{" in self.path or not shared), "") if len(methods) > 1 else ""
        if "`If-Match`" in does and not self._versioned():
            does = ""
        return " ".join(part for part in (about, does) if part)

    def _versioned(self) -> bool:
        """Whether the object has an ETag: what cannot be changed has none."""
        return hasattr(self.view, "patch") or hasattr(self.view, "put")

    def _who(self) -> str:
        """The rule that the view is called by; for service accounts also the scopes."""
        rule = self.view.access.get(self.method, IsAdmin)()
        opening = " or ".join(f"`{scope}`" for scope in scopes_for(self.method, self.path))
        told = f"Role: {_least(rule)}; a service account also needs the scope {opening}."
        return f"{told} {TENANT}" if _role(rule) is None else told


def _role(rule: Any) -> Any:
    return getattr(rule, "role", None)


def _least(rule: Any) -> str:
    """The least role that gets in. Rules that let tenants' keys in too have two operands, the role's first."""
    role = _role(rule) or _role(rule.op1)
    return str(role.name).lower()


@cache
def page_of(output: type[serializers.Serializer]) -> type[serializers.Serializer]:
    """The serializer of a page of `output`."""
    fields: dict[str, Any] = {
        "__doc__": "One page of a list.",
        "items": output(many=True),
        "next_cursor": serializers.CharField(
            allow_null=True, help_text="Send as `cursor` to get the next page; null on the last one."
        ),
    }
    return type(output.__name__.removesuffix("Output") + "Page", (serializers.Serializer,), fields)


def operation(
    name: str,
    summary: str,
    *,
    query: type[serializers.Serializer] | None = None,
    body: type[serializers.Serializer] | None = None,
    answer: type[serializers.Serializer] | None = None,
    status: int = 200,
    errors: tuple[int, ...] = LISTED,
    created: bool = False,
) -> Callable[[Any], Any]:
    """Describe one method of a view. `name` is the operation's id in generated clients. `created`: the method creates
    an object that does not exist yet, which it answers with 201."""
    answers: dict[int, Any] = {status: answer if answer is not None else OpenApiResponse(description="Done.")}
    if created:
        answers[201] = OpenApiResponse(answer, description="Created.")
    for code in errors:
        answers[code] = OpenApiResponse(StaleOutput if code == 412 else ErrorOutput, description=ERRORS[code])
    headers = [IF_MATCH] * (412 in errors) + [IF_NONE_MATCH] * created
    return extend_schema(
        operation_id=name,
        summary=summary,
        parameters=[*([query] if query else []), *headers],
        request=body,
        responses=answers,
    )
