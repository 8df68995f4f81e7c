"""Looks up objects that a body refers to by name. A missing object is an error of that field."""

from __future__ import annotations

from typing import Any, NoReturn

from django.db.models import QuerySet

from api.control.framework.errors import ControlApiError
from controller.models import Host, LaunchTemplate, ServedModel, SLOClass, Tenant
from controller.selectors import catalogue


def tenant_named(name: str | None, field: str) -> Tenant | None:
    return None if name is None else _named(catalogue.tenants(), name, field)


def model_named(name: str, field: str) -> ServedModel:
    return _named(catalogue.served_models(), name, field)


def host_named(name: str | None, field: str) -> Host | None:
    return None if name is None else _named(catalogue.hosts(), name, field)


def template_named(name: str | None, field: str) -> LaunchTemplate | None:
    return None if name is None else _named(catalogue.launch_templates(), name, field)


def class_named(name: str, field: str, tenant: Tenant | None) -> SLOClass:
    """The tenant's own class of this name, else the shared one."""
    found = catalogue.slo_class_for(name=name, tenant=tenant)
    return found if found is not None else _missing(field)


def _named(rows: QuerySet[Any], name: str, field: str) -> Any:
    found = rows.filter(name=name).first()
    return found if found is not None else _missing(field)


def _missing(field: str) -> NoReturn:
    message = "No object with this name exists."
    raise ControlApiError(f"{field}: {message}", {field: [message]})
