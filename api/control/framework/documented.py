"""The decorator that describes an operation in the OpenAPI document, with the error responses that all operations
share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework import serializers

ERRORS = {
    400: "A field is wrong; `error.fields` names it.",
    401: "The caller is not signed in, or the API key is not valid.",
    403: "The caller's role does not allow this.",
    404: "The object does not exist or belongs to another tenant.",
    409: "The change conflicts with stored data.",
    412: "The object has changed since (or exists already); `error` has the stored object and the differences.",
    428: "The change does not name the version that it is based on.",
    429: "Too many requests; see `Retry-After`.",
    503: "PostgreSQL or Redis does not answer; see `Retry-After`.",
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


class DifferenceOutput(serializers.Serializer):
    """A field in which the stored object differs from the body of the call."""

    field = serializers.CharField()
    stored = serializers.JSONField(allow_null=True)
    sent = serializers.JSONField(allow_null=True)


class StaleBody(ErrorBody):
    """Why the precondition failed, and what is stored."""

    current = serializers.DictField(allow_null=True, required=False, help_text="The stored object, with its `etag`.")
    differences = DifferenceOutput(many=True, required=False)


class StaleOutput(serializers.Serializer):
    """The error of a failed precondition."""

    error = StaleBody()


IF_MATCH = OpenApiParameter(
    "If-Match",
    location=OpenApiParameter.HEADER,
    description="The ETag of the version that the change is based on, or `*` for any version.",
)
IF_NONE_MATCH = OpenApiParameter(
    "If-None-Match", location=OpenApiParameter.HEADER, enum=["*"], description="Create only; 412 if the object exists."
)


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
