"""If-Match and If-None-Match: a change names the version of the object that it is based on.

The ETag of an object is its version in quotes. It identifies the configuration, not the bytes of the response: an
observed state may change while the ETag stays.

| header | change of an object |
|---|---|
| `If-Match: "3"` | only if version 3 is stored; otherwise 412 with the stored object and the differences |
| `If-Match: *` | whatever version is stored |
| none | PATCH: 428. PUT, DELETE and actions: whatever version is stored |
| `If-None-Match: *` | PUT only: create, and 412 if the object exists |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rest_framework import status
from rest_framework.request import Request

from api.control.framework.errors import ControlApiError
from controller.services.replace import ExpectedVersion

VERSION_MAX = 2**31 - 1
ANY = "*"


class VersionRequired(ControlApiError):
    """The version that a change names is malformed."""

    default_code = "validation_failed"

    def __init__(self, message: str) -> None:
        super().__init__(message, {"version": [message]})


class PreconditionRequired(ControlApiError):
    """A partial change must name the version of the object that it is based on."""

    status_code = status.HTTP_428_PRECONDITION_REQUIRED
    default_code = "precondition_required"

    def __init__(self) -> None:
        message = "Required: send the ETag in If-Match, or `version` in the body."
        super().__init__(message, {"version": [message]})


@dataclass(frozen=True, slots=True)
class Stated:
    """What a call says about the stored version. `version` None: nothing, or `*` (`anyone`)."""

    version: int | None = None
    anyone: bool = False

    @property
    def said(self) -> bool:
        return self.anyone or self.version is not None


def claimed_version(request: Request, data: dict[str, Any]) -> int | None:
    """The version that a change is based on, from body or If-Match; None for `If-Match: *`. Raises
    PreconditionRequired if it is missing."""
    stated = _stated(request, data)
    if not stated.said:
        raise PreconditionRequired
    return stated.version


def stated_version(request: Request, data: dict[str, Any]) -> int | None:
    """The version in the body, which is removed from it, or in If-Match; None without one."""
    return _stated(request, data).version


def matched_version(request: Request) -> int | None:
    """The version in If-Match, or None. A removal without one removes any version."""
    return _matched(request).version


def expected(request: Request) -> ExpectedVersion:
    """What a PUT expects to find, from its headers."""
    stated, only_new = _matched(request), request.headers.get("If-None-Match", "").strip()
    if only_new and only_new != ANY:
        raise ControlApiError("If-None-Match must be `*`.")
    if only_new and stated.said:
        raise ControlApiError("Send either If-Match or If-None-Match.")
    return ExpectedVersion(version=stated.version, exists=stated.said, missing=bool(only_new))


def _stated(request: Request, data: dict[str, Any]) -> Stated:
    named, matched = data.pop("version", None), _matched(request)
    if named is not None and matched.version is not None and named != matched.version:
        raise VersionRequired("`version` and If-Match must name the same version.")
    return Stated(named) if named is not None else matched


def _matched(request: Request) -> Stated:
    header = request.headers.get("If-Match", "").strip()
    if not header:
        return Stated()
    return Stated(anyone=True) if header == ANY else Stated(_version_of(header))


def _version_of(header: str) -> int:
    """Weak tags are accepted, since proxies that compress responses weaken the tag."""
    digits = header.removeprefix("W/").strip('"')
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 10 and int(digits) <= VERSION_MAX):
        raise VersionRequired('If-Match must be `*` or one ETag of the object, for example "3".')
    return int(digits)
