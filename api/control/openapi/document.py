"""The OpenAPI document: served at `/api/schema`, shown at `/api/docs`, stored in `docs/openapi.yaml` (`make openapi`).

The page loads nothing from other servers and has no inline script or style, so the console's content security policy
applies to it too.
"""

from __future__ import annotations

from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerSplitView

from api.control.openapi.data_path import COMPONENTS, PATHS

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
    result["paths"] = {**result["paths"], **PATHS}
    result["components"].setdefault("schemas", {}).update(COMPONENTS)
    return result


class SchemaView(SpectacularAPIView):
    """The document as YAML, or as JSON on request. It needs no login, since it contains no data."""

    authentication_classes = ()


class DocsView(SpectacularSwaggerSplitView):
    """The document as a web page."""

    authentication_classes = ()
    url_name = "api-schema"
    template_name = "api/docs.html"
