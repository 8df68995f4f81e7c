"""Errors for clients, in vLLM's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

_TYPES = {404: "NotFoundError", 413: "RequestTooLargeError", 503: "ServiceUnavailableError"}


class HttpError(Exception):
    """`param`: the field at fault, None if there is no single one; `extra`: more fields of the error object."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, extra: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.extra = extra or {}

    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.status, **self.extra}
        return orjson.dumps({"error": error})
