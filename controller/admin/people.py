"""Superusers edit people and their roles here; each change is recorded as a Decision."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.auth.admin import UserAdmin
from django.contrib.auth.models import Group, User
from django.db.models import QuerySet
from django.http import HttpRequest

from controller.admin.base import ReadOnlyAdmin
from controller.services.actors import Actor
from controller.services.decisions import decision_record

admin.site.unregister(User)
admin.site.unregister(Group)


@admin.register(Group)
class RoleAdmin(ReadOnlyAdmin):
    """The three roles are fixed; a person's role is set on the person."""

    list_display = ("name",)
    exclude = ("permissions",)


@admin.register(User)
class PersonAdmin(UserAdmin):
    """Django's user admin, with an audit record in the transaction of each change, which never contains a password."""

    list_display = ("username", "email", "is_active", "is_superuser", "last_login")
    fieldsets = (
        (None, {"fields": ("username", "password")}),
        ("Person", {"fields": ("first_name", "last_name", "email")}),
        ("Access", {"fields": ("is_active", "is_staff", "is_superuser", "groups")}),
        ("Dates", {"fields": ("last_login", "date_joined")}),
    )

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Django's own permissions, which a shell can set, do not make anybody who may give roles."""
        return request.user.is_active and request.user.is_superuser

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self.has_module_permission(request)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return self.has_module_permission(request)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self.has_module_permission(request)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self.has_module_permission(request)

    def log_addition(self, request: HttpRequest, obj: User, message: Any) -> Any:
        _audit(request, "created", obj, {"after": _seen(obj)})
        return super().log_addition(request, obj, message)

    def log_change(self, request: HttpRequest, obj: User, message: Any) -> Any:
        fields = [name for part in message if isinstance(part, dict) for name in _changed(part)]
        _audit(request, "updated", obj, {"fields": fields or [str(message)], "after": _seen(obj)})
        return super().log_change(request, obj, message)

    def log_deletions(self, request: HttpRequest, queryset: QuerySet[User]) -> Any:
        for person in queryset:
            _audit(request, "removed", person, {"before": _seen(person)})
        return super().log_deletions(request, queryset)


def _changed(part: dict[str, Any]) -> list[str]:
    return [str(name) for name in part.get("changed", {}).get("fields", [])]


def _seen(person: User) -> dict[str, Any]:
    return {
        "username": person.username,
        "is_active": person.is_active,
        "is_staff": person.is_staff,
        "is_superuser": person.is_superuser,
        "roles": sorted(person.groups.values_list("name", flat=True)),
    }


def _audit(request: HttpRequest, what: str, person: User, inputs: dict[str, Any]) -> None:
    decision_record(
        actor=Actor.person(request.user.get_username()),
        kind=f"person_{what}",
        subject_type="person",
        subject=person.username,
        reason=f"person_{what}",
        inputs=inputs,
        outcome={"id": person.pk},
    )
