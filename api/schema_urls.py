"""Where the OpenAPI document and its page live."""

from __future__ import annotations

from django.urls import path

from api.schema import DocsView, SchemaView

urlpatterns = [
    path("schema", SchemaView.as_view(), name="api-schema"),
    path("docs", DocsView.as_view(), name="api-docs"),
]
