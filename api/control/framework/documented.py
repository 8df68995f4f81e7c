"""The decorator that describes an operation in the OpenAPI document, with the error responses that all operations
share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework import serializers

ERRORS = {
    400: "A field is wrong; `error.fields` names it.",
    401: "The caller is not signed in, or the API key is not valid.",
    403: "The caller's role does not allow this.",
    404: "The object does not exist or belongs to another tenant.",
    409: "The object has changed since, or the change conflicts with stored data.",
    429: "Too many requests; see `Retry-After`.",
    503: "PostgreSQL or Redis does not answer; see `Retry-After`.",
}

LISTED = (400, 401, 403, 429, 503)
CREATED = (400, 401, 403, 409, 429, 503)
FOUND = (401, 403, 404, 429, 503)
CHANGED = (400, 401, 403, 404, 409, 429, 503)


class ErrorBody(serializers.Serializer):
    """What went wrong."""

    code = serializers.CharField(help_text="Stable, for programs.")
    message = serializers.CharField(help_text="For people.")
    fields_ = serializers.DictField(
        child=serializers.ListField(child=serializers.CharField()), help_text="Field names to messages."
    )

    def get_fields(self) -> dict[str, serializers.Field]:
        """Renames `fields_` to `fields`, which is a name of Django REST framework and cannot be declared directly."""
        found = super().get_fields()
        found["fields"] = found.pop("fields_")
        return found


class ErrorOutput(serializers.Serializer):
    """The one shape of every error."""

    error = ErrorBody()


@cache
def page_of(output: type[serializers.Serializer]) -> type[serializers.Serializer]:
    """The serializer of a page of `output`."""
    fields: dict[str, Any] = {
        "__doc__": "A keyset page.",
        "items": output(many=True),
        "next_cursor": serializers.CharField(allow_null=True, help_text="Pass as `cursor`; null on the last page."),
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
) -> Callable[[Any], Any]:
    """Describe one method of a view. `name` is the operation's id in generated clients."""
    answers: dict[int, Any] = {status: answer if answer is not None else OpenApiResponse(description="Done.")}
    for code in errors:
        answers[code] = OpenApiResponse(ErrorOutput, description=ERRORS[code])
    return extend_schema(
        operation_id=name,
        summary=summary,
        parameters=[query] if query else [],
        request=body,
        responses=answers,
    )
