"""What a client did wrong, in vLLM's error shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

_TYPES = {404: "NotFoundError", 413: "RequestTooLargeError", 503: "ServiceUnavailableError"}


class HttpError(Exception):
    """`param` names the field to change, None where no single field is wrong; `told`: what else the answer says."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, told: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.told = told or {}

    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.status, **self.told}
        return orjson.dumps({"error": error})
