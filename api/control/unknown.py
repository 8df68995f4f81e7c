"""Returns 404 for unknown paths of the control API, in the format of its errors."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework.exceptions import NotFound
from rest_framework.permissions import AllowAny
from rest_framework.request import Request

from api.control.framework.base import ControlView


@extend_schema(exclude=True)
class UnknownPath(ControlView):
    """404 for every method, without authentication."""

    def get_permissions(self) -> list[Any]:
        return [AllowAny()]

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        raise NotFound("Unknown path. Paths have no trailing slash; see /api/docs.")
