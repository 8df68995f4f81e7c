"""The OpenAPI document: served at `/api/schema`, shown at `/api/docs`, stored in `docs/openapi.yaml` (`make openapi`).

The page loads nothing from other servers and has no inline script or style, so the console's content security policy
applies to it too.
"""

from __future__ import annotations

from functools import lru_cache
from threading import Lock
from typing import Any

from django.http import HttpResponse
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.settings import spectacular_settings
from drf_spectacular.utils import extend_schema
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerSplitView
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request

from api.control.openapi.data_path import COMPONENTS, PATHS
from api.control.openapi.stored_responses import STORED_RESPONSE_PATHS

BEARER = "An API key of a tenant (`sk-...`), or a token of a service account (`slk-...`, control API only)."


class BearerKeyScheme(OpenApiAuthenticationExtension):
    """Describes API keys, which the control API and the data path share, and tokens of service accounts."""

    target_class = "api.control.access.auth.BearerKeyAuthentication"
    name = "apiKey"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer", "description": BEARER}


class PeopleSessionScheme(OpenApiAuthenticationExtension):
    """Describes the console's session cookie."""

    target_class = "api.control.access.auth.PeopleSessionAuthentication"
    name = "session"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {
            "type": "apiKey",
            "in": "cookie",
            "name": "slackline_session_8000",
            "description": (
                "The console's login; the cookie's name ends in the console's port. Changes also need the CSRF token "
                "as `X-CSRFToken`."
            ),
        }


def add_data_path(result: dict[str, Any], generator: Any, request: Any, public: bool) -> dict[str, Any]:
    """Add the gateway's endpoints, for which there are no Django views."""
    result["paths"] = {**result["paths"], **PATHS, **STORED_RESPONSE_PATHS}
    result["components"].setdefault("schemas", {}).update(COMPONENTS)
    return result


class SchemaView(SpectacularAPIView):
    """The document as YAML, or as JSON on request. It needs no login, since it contains no data, so it is made once:
    that takes a good part of a second, and anybody may ask for it."""

    authentication_classes = ()

    @extend_schema(exclude=True)
    def get(self, request: Request, *args: Any, **named: Any) -> HttpResponse:
        renderer: BaseRenderer = request.accepted_renderer
        with _MAKING:
            content = _rendered(renderer.__class__)
        named_as = f'inline; filename="{spectacular_settings.TITLE}.{renderer.format}"'
        kind = f"{renderer.media_type}; charset=utf-8"
        return HttpResponse(content, content_type=kind, headers={"Content-Disposition": named_as})


_MAKING = Lock()


@lru_cache(maxsize=8)
def _rendered(renderer: type[BaseRenderer]) -> bytes:
    document = SchemaView.generator_class().get_schema(request=None, public=True)
    return bytes(renderer().render(document, renderer.media_type, {}))


class DocsView(SpectacularSwaggerSplitView):
    """The document as a web page."""

    authentication_classes = ()
    url_name = "api-schema"
    template_name = "api/docs.html"
