"""The OpenAPI document: served at `/api/schema`, shown at `/api/docs`, kept in `docs/openapi.yaml` (`make openapi`).

The pages load nothing from elsewhere and need no inline script or style, so that the console's content security policy
holds for them too.
"""

from __future__ import annotations

from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerSplitView

from api.data_path_schema import COMPONENTS, PATHS


class BearerKeyScheme(OpenApiAuthenticationExtension):
    """Describes API keys, which the control API and the data path share."""

    target_class = "api.auth.BearerKeyAuthentication"
    name = "apiKey"

    def get_security_definition(self, auto_schema: Any) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer", "description": "An API key of a tenant (`sk-...`)."}


class PeopleSessionScheme(OpenApiAuthenticationExtension):
    """Describes the console's session cookie."""

    target_class = "api.auth.PeopleSessionAuthentication"
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
    """Merge the gateway's endpoints, which no Django view stands for."""
    result["paths"] = {**result["paths"], **PATHS}
    result["components"].setdefault("schemas", {}).update(COMPONENTS)
    return result


class SchemaView(SpectacularAPIView):
    """The document as YAML, or as JSON where asked for; public, since it holds no data."""

    authentication_classes = ()


class DocsView(SpectacularSwaggerSplitView):
    """The document as a page for people."""

    authentication_classes = ()
    url_name = "api-schema"
    template_name = "api/docs.html"
