"""Base of all control views: access by method, validated input, pagination, versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

from django.core.exceptions import ObjectDoesNotExist
from django.db import DatabaseError
from django.db.models import QuerySet
from rest_framework import serializers, status
from rest_framework.exceptions import NotFound, ParseError
from rest_framework.negotiation import DefaultContentNegotiation
from rest_framework.parsers import JSONParser
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from api.control.access.auth import (
    BearerKeyAuthentication,
    PeopleSessionAuthentication,
    ScopeMissing,
    TenantPrincipal,
)
from api.control.access.permissions import IsAdmin, IsTenantKey, IsViewer
from api.control.access.refusals import refusal_record
from api.control.access.scopes import scope_missing
from api.control.access.throttle import KeyThrottle, PersonThrottle
from api.control.framework.differences import add_stored, as_sent
from api.control.framework.documented import OperationSchema
from api.control.framework.errors import exception_handler
from api.control.framework.fields import etag_of, name_choices
from api.control.framework.pagination import CURSOR_LENGTH_MAX, LIMIT_DEFAULT, LIMIT_MAX, paginate
from controller.selectors.roles import ServicePrincipal
from controller.services.actors import Actor
from controller.services.change import VersionConflict
from controller.services.replace import AlreadyStored
from workers.notices import announce_config

UNKNOWN = "Unknown field."

SIGNED_IN = IsViewer | IsTenantKey


class PageQuery(serializers.Serializer):
    """Query parameters of every list."""

    limit = serializers.IntegerField(
        min_value=1, max_value=LIMIT_MAX, default=LIMIT_DEFAULT, help_text="Items on a page."
    )
    cursor = serializers.CharField(
        max_length=CURSOR_LENGTH_MAX, required=False, help_text="The `next_cursor` of the page before."
    )


class BoundedJSONParser(JSONParser):
    """A JSON parser that reports a body nested too deeply for Python as an error of the caller, not as a defect."""

    def parse(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().parse(*args, **kwargs)
        except RecursionError as error:
            raise ParseError("JSON parse error - nested too deeply.") from error


class ControlView(APIView):
    """Base of all control views. `access`: the permission by HTTP method; methods that are not listed are for admins.

    A method that the view does not have gets 405 for everyone signed in. `configures`: whether its writes change the
    configuration of gateways.
    """

    authentication_classes: ClassVar[Sequence[type]] = [BearerKeyAuthentication, PeopleSessionAuthentication]
    parser_classes: ClassVar[Sequence[type]] = [BoundedJSONParser]
    renderer_classes: ClassVar[Sequence[type]] = [JSONRenderer]
    throttle_classes: ClassVar[Sequence[type]] = [KeyThrottle, PersonThrottle]
    content_negotiation_class = DefaultContentNegotiation
    schema = OperationSchema()
    access: ClassVar[Mapping[str, Any]] = {}
    configures: ClassVar[bool] = True
    _sent: Mapping[str, Any] = MappingProxyType({})  # the values of the body, as a response would show them

    def get_permissions(self) -> list[BasePermission]:
        method = self.request.method or ""
        if not hasattr(self, method.lower()):
            return [SIGNED_IN()]  # type: ignore[operator]  # rest_framework combines permissions with `|` at run time
        return [self.access.get("GET" if method == "HEAD" else method, IsAdmin)()]

    def check_permissions(self, request: Request) -> None:
        """Of a service account its role first, then its scopes."""
        super().check_permissions(request)
        if isinstance(request.user, ServicePrincipal):
            missing = scope_missing(request.user.scopes, request.method or "", request.path)
            if missing:
                raise ScopeMissing(f"This service account lacks the scope {missing!r}.")

    def finalize_response(self, request: Request, response: Response, *args: Any, **kwargs: Any) -> Response:
        if self.configures and request.method not in SAFE_METHODS and status.is_success(response.status_code):
            announce_config()
        return super().finalize_response(request, response, *args, **kwargs)

    def handle_exception(self, exc: Exception) -> Response:
        response: Response = super().handle_exception(exc)
        if isinstance(exc, VersionConflict | AlreadyStored):
            add_stored(response, self._stored(), {**exc.absent, **self._sent})
        refusal_record(self.request, exc)  # after the handler has rolled back the transaction
        return response

    def get_exception_handler(self) -> Any:
        return exception_handler

    @property
    def tenant_id(self) -> int | None:
        """The tenant of the API key that calls, or None for a person. Every list must filter by it."""
        user = self.request.user
        return user.tenant_id if isinstance(user, TenantPrincipal) else None

    @property
    def _shown_to(self) -> dict[str, Any]:
        """For serializers that show people more than a tenant's key."""
        return {"people": self.tenant_id is None}

    @property
    def tenant_name(self) -> str | None:
        """The name of that tenant, as in records."""
        user = self.request.user
        return user.tenant if isinstance(user, TenantPrincipal) else None

    @property
    def actor(self) -> Actor:
        """Who makes a change, for the audit: a person or a service account. API keys cannot change anything."""
        if isinstance(self.request.user, ServicePrincipal):
            return Actor.service(self.request.user.name)
        return Actor.person(self.request.user.get_username())

    def query(self, serializer: type[serializers.Serializer]) -> dict[str, Any]:
        """The validated query parameters. Unknown parameters are errors."""
        return dict(_checked(serializer, self.request.query_params.dict()).validated_data)

    def body(self, serializer: type[serializers.Serializer], *, partial: bool = False) -> dict[str, Any]:
        """The validated JSON body. Unknown fields are errors, so that a typo is never ignored silently."""
        if not isinstance(self.request.data, Mapping):
            raise serializers.ValidationError("The body must be a JSON object.")
        bound = _checked(serializer, dict(self.request.data), partial=partial, why_not=self._why_not)
        self._sent = as_sent(bound)
        return dict(bound.validated_data)

    def _why_not(self, field: str) -> str:
        """Why the body may not have this field: it is unknown, or it is read-only."""
        if field not in self._shown:
            return UNKNOWN
        return "This field cannot be changed." if self.request.method == "PATCH" else "This field cannot be set."

    @cached_property
    def _shown(self) -> frozenset[str]:
        """The fields of the response, taken from the OpenAPI description of this call."""
        handler = getattr(self, (self.request.method or "").lower())
        schema = handler.kwargs["schema"]()
        schema.view, schema.method = self, self.request.method
        answers = [each for each in schema.get_response_serializers().values() if isinstance(each, type)]
        return frozenset(name for answer in answers for name in answer().fields)

    def page(
        self, rows: QuerySet[Any], order: Sequence[str], output: type[serializers.Serializer], query: Mapping[str, Any]
    ) -> Response:
        page = paginate(rows, order, query["limit"], query.get("cursor"))
        items = output(page.items, many=True, context=self._shown_to).data
        return Response({"items": items, "next_cursor": page.next_cursor})

    def only(self, rows: QuerySet[Any]) -> Any:
        """The one row of the query. Rows of other tenants are answered with 404 too."""
        row = rows.first()
        if row is None:
            raise NotFound("Not found.")
        return row

    def stored(self, row: Any, output: type[serializers.Serializer], created: bool) -> Response:
        """The answer of a PUT."""
        return self.one(row, output, status.HTTP_201_CREATED if created else status.HTTP_200_OK)

    def current(self) -> Mapping[str, Any] | None:
        """The stored object, as this address shows it; None if it does not show one."""
        shows = getattr(self, "get", None)
        return None if shows is None else shows(self.request, **self.kwargs).data

    def _stored(self) -> Mapping[str, Any] | None:
        try:
            return self.current()
        except (NotFound, ObjectDoesNotExist, DatabaseError):  # removed in the meantime, or PostgreSQL is unavailable
            return None

    def found(self, rows: QuerySet[Any], pk: Any) -> Any:
        """The row with this key that the caller may see. Rows of other tenants are answered with 404 too."""
        return self.only(rows.filter(pk=pk))

    def one(self, row: Any, output: type[serializers.Serializer], code: int = status.HTTP_200_OK) -> Response:
        """One object, with its ETag for a later If-Match."""
        response = Response(output(row, context=self._shown_to).data, status=code)
        version = getattr(row, "version", None)
        if version is not None:
            response["ETag"] = etag_of(version)
        return response


def filtered(rows: QuerySet[Any], query: Mapping[str, Any], lookups: Mapping[str, str]) -> QuerySet[Any]:
    """Filter by the given query parameters. An empty text matches rows whose reference is null."""
    for name, lookup in lookups.items():
        value = query.get(name)
        if value == "" and "__" in lookup:
            rows = rows.filter(**{f"{lookup.split('__')[0]}__isnull": True})
        elif value is not None:
            rows = rows.filter(**{lookup: value})
    return rows


def without_page(query: Mapping[str, Any]) -> dict[str, Any]:
    """The query without the parameters of pagination."""
    return {name: value for name, value in query.items() if name not in ("limit", "cursor")}


def _checked(
    serializer: type[serializers.Serializer],
    raw: dict[str, Any],
    *,
    partial: bool = False,
    why_not: Callable[[str], str] = lambda field: UNKNOWN,
) -> serializers.Serializer:
    bound = serializer(data=raw, partial=partial)
    unknown = {name: [why_not(name)] for name in raw if name not in bound.fields}
    if unknown:
        raise serializers.ValidationError(unknown)
    name_choices(bound)
    bound.is_valid(raise_exception=True)
    return bound
