"""What a client did wrong, in vLLM's error shape."""

from __future__ import annotations

import orjson

_TYPES = {404: "NotFoundError", 413: "RequestTooLargeError", 503: "ServiceUnavailableError"}


class ApiError(Exception):
    """`param` names the field to change, or is None where no single field is wrong."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    def body(self) -> bytes:
        kind = _TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.status}
        return orjson.dumps({"error": error})
