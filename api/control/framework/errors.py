"""Errors of the control API: `{"error": {"code", "message", "fields"}}`. Codes are stable.

`fields` maps the fields that the caller must change ("ttft_s", "levels.0.ttft_s", "limit") to messages for people; it
is empty if no single field is at fault. The data path uses OpenAI's format instead (`api.openai.protocol.errors`).

| status | codes |
|---|---|
| 400 | `validation_failed`, `malformed_body`, `invalid_cursor` |
| 401 | `not_authenticated`, `invalid_api_key` |
| 403 | `permission_denied` |
| 404 | `not_found` (also for what belongs to another tenant) |
| 405, 406, 415 | `method_not_allowed`, `not_acceptable`, `unsupported_media_type` |
| 409 | `conflict` |
| 412 | `version_conflict`, `precondition_failed`, with the stored object and the differences (`preconditions.py`) |
| 428 | `precondition_required` |
| 429 | `rate_limit_exceeded`, with `Retry-After` |
| 503 | `database_unavailable`, `live_data_unavailable`, `log_unavailable`, with `Retry-After` |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from django.core.exceptions import ObjectDoesNotExist, PermissionDenied
from django.core.exceptions import ValidationError as ModelValidationError
from django.db import DataError, IntegrityError, InterfaceError, OperationalError
from django.http import Http404
from rest_framework import exceptions, status
from rest_framework.response import Response
from rest_framework.settings import api_settings
from rest_framework.views import set_rollback

from controller.core.errors import ConfigError
from controller.services.change import VersionConflict
from controller.services.replace import AlreadyStored, FixedField, NotStored
from workers.live import LiveUnavailable

log = logging.getLogger(__name__)

RETRY_AFTER_S = 2  # PostgreSQL and Redis are available within seconds of a restart

Fields = dict[str, list[str]]


class ControlApiError(exceptions.APIException):
    """An error of the control API with a stable code. `fields`: messages by field that the caller must change."""

    status_code = status.HTTP_400_BAD_REQUEST
    default_code = "validation_failed"
    default_detail = "The request is not valid."

    def __init__(self, message: str | None = None, fields: Fields | None = None) -> None:
        super().__init__(message)
        self.fields = fields or {}


class Conflict(ControlApiError):
    """The request conflicts with stored data (a taken name, an object in use)."""

    status_code = status.HTTP_409_CONFLICT
    default_code = "conflict"
    default_detail = "The request conflicts with the stored data."


class LiveDataUnavailable(ControlApiError):
    """No gateway or no Redis responds, so the live data is unknown."""

    status_code = status.HTTP_503_SERVICE_UNAVAILABLE
    default_code = "live_data_unavailable"
    default_detail = "No gateway is responding. Try again shortly."


class LogUnavailable(ControlApiError):
    """The log of an engine is there and cannot be read."""

    status_code = status.HTTP_503_SERVICE_UNAVAILABLE
    default_code = "log_unavailable"


TAKEN = ("unique", "unique_together")  # Django's codes for values that must be unique and exist already

# Our codes for those of Django REST framework.
CODES = {
    "invalid": "validation_failed",
    "parse_error": "malformed_body",
    "authentication_failed": "invalid_api_key",
    "throttled": "rate_limit_exceeded",
    "error": "internal_error",
}


def exception_handler(exc: Exception, context: Mapping[str, Any]) -> Response:
    """The exception handler of Django REST framework: turns every exception of a control view into a response."""
    set_rollback()
    response = _response_for(exc, context)
    if response.status_code == status.HTTP_503_SERVICE_UNAVAILABLE:
        response["Retry-After"] = str(RETRY_AFTER_S)
    return response


def error_response(code: int, name: str, message: str, fields: Fields | None = None) -> Response:
    return Response({"error": {"code": name, "message": message, "fields": fields or {}}}, status=code)


Rule = Callable[[Exception], Response]


def _response_for(exc: Exception, context: Mapping[str, Any]) -> Response:
    """The response of the first rule that matches the exception; without one it is an internal error."""
    removing = getattr(context.get("request"), "method", "") == "DELETE"
    for kinds, rule in RULES:
        if isinstance(exc, kinds):
            response = rule(exc)
            # A DELETE has no values that could be invalid, so the error comes from stored data.
            return _as_conflict(response) if removing and isinstance(exc, ModelValidationError) else response
    return _defect(exc, context)


def _not_found(exc: Exception) -> Response:
    return error_response(404, "not_found", "Not found.")


def _forbidden(exc: Exception) -> Response:
    return error_response(403, "permission_denied", str(exc) or "You do not have permission to do this.")


def _stale_version(exc: Exception) -> Response:
    """The view adds the stored object and the differences."""
    return error_response(412, "version_conflict", str(exc), {"version": [str(exc)]})


def _precondition_failed(exc: Exception) -> Response:
    return error_response(412, "precondition_failed", str(exc))


def _fixed_field(exc: Any) -> Response:
    return error_response(409, "conflict", str(exc), {name: [message] for name, message in exc.fields.items()})


def _from_service(exc: Any) -> Response:
    """A validation error of a service: 409 if it is only about taken names, else 400."""
    details = exc.error_dict if hasattr(exc, "error_dict") else {"": exc.error_list}
    fields = _flat({name: [str(text) for one in errors for text in one.messages] for name, errors in details.items()})
    message = _first(fields)
    for one in (one for errors in details.values() for one in errors):
        together = (one.params or {}).get("unique_check", ()) if one.code == "unique_together" else ()
        fields = {name: [str(text) for text in one.messages] for name in together} | fields
    response = error_response(400, "validation_failed", message, _named(fields))
    taken = all(one.code in TAKEN for errors in details.values() for one in errors)
    return _as_conflict(response) if taken else response


def _as_conflict(response: Response) -> Response:
    error = response.data["error"]
    return error_response(409, "conflict", error["message"], error["fields"])


def _from_policy(exc: Exception) -> Response:
    field = getattr(exc, "field", None)
    return error_response(400, "validation_failed", str(exc), {field: [str(exc)]} if field else {})


def _unstorable(exc: Exception) -> Response:
    return error_response(
        400, "validation_failed", "A value is out of range or contains characters that cannot be stored."
    )


def _broken_rule(exc: Exception) -> Response:
    """Two concurrent writers: both passed validation, and the database rejected the second."""
    diag = getattr(exc.__cause__, "diag", None)
    name = getattr(diag, "constraint_name", None)
    message = (
        f"The request violates the database constraint {name!r}."
        if name
        else "The request conflicts with the stored data."
    )
    return error_response(409, "conflict", message)


def _database_away(exc: Exception) -> Response:
    log.warning("PostgreSQL is unavailable: %s", exc, extra={"action": "database_unavailable"})
    return error_response(503, "database_unavailable", "PostgreSQL is unavailable. Try again shortly.")


def _redis_away(exc: Exception) -> Response:
    log.warning("Redis is unavailable: %s", exc, extra={"action": "redis_unavailable"})
    return error_response(503, "live_data_unavailable", "Redis is unavailable. Try again shortly.")


def _from_drf(exc: Any) -> Response:
    headers = {"WWW-Authenticate": exc.auth_header} if getattr(exc, "auth_header", None) else {}
    if isinstance(exc, exceptions.Throttled) and exc.wait is not None:
        headers["Retry-After"] = str(max(1, round(exc.wait + 0.5)))
    if isinstance(exc, exceptions.ValidationError):
        fields = _flat(exc.detail)
        response = error_response(exc.status_code, "validation_failed", _first(fields), _named(fields))
    else:
        ours = isinstance(exc, ControlApiError)
        code = exc.default_code if ours else str(getattr(exc.detail, "code", exc.default_code))
        fields = exc.fields if ours else {}
        response = error_response(exc.status_code, CODES.get(code, code), str(exc.detail), fields)
    for name, value in headers.items():
        response[name] = value
    return response


def _defect(exc: Exception, context: Mapping[str, Any]) -> Response:
    """The response to an unexpected error. The traceback goes to the log only."""
    view = type(context.get("view")).__name__
    log.error("unexpected error in %s", view, exc_info=exc, extra={"action": "api_defect", "view": view})
    return error_response(500, "internal_error", "Internal error. It was logged.")


def _flat(detail: Any, path: str = "") -> Fields:
    """Nested error details with dotted names: `{"levels": [{}, {"ttft_s": [..]}]}` gives `levels.1.ttft_s`."""
    fields: Fields = {}
    for name, message in _leaves(detail, path):
        fields.setdefault(name, []).append(message)
    return fields


def _leaves(detail: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(detail, Mapping):
        for key, value in detail.items():
            own = "" if key in (api_settings.NON_FIELD_ERRORS_KEY, "__all__", "") else str(key)
            yield from _leaves(value, ".".join(part for part in (path, own) if part))
    elif isinstance(detail, list | tuple):
        for index, value in enumerate(detail):
            nested = isinstance(value, Mapping | list | tuple)
            yield from _leaves(value, f"{path}.{index}" if nested and path else path)
    else:
        yield path, str(detail)


def _first(fields: Fields) -> str:
    """The first message, with its field, as the message of the whole error."""
    for name, messages in fields.items():
        return f"{name}: {messages[0]}" if name else messages[0]
    return "The request is not valid."


def _named(fields: Fields) -> Fields:
    return {name: messages for name, messages in fields.items() if name}


RULES: tuple[tuple[tuple[type[Exception], ...], Rule], ...] = (
    ((exceptions.APIException,), _from_drf),
    ((Http404, ObjectDoesNotExist), _not_found),
    ((PermissionDenied,), _forbidden),
    ((VersionConflict,), _stale_version),
    ((AlreadyStored, NotStored), _precondition_failed),
    ((FixedField,), _fixed_field),
    ((ModelValidationError,), _from_service),
    ((ConfigError,), _from_policy),
    ((DataError,), _unstorable),
    ((IntegrityError,), _broken_rule),
    ((OperationalError, InterfaceError), _database_away),
    ((LiveUnavailable,), _redis_away),
)
