"""The role of a person: viewers read, operators act, admins also manage people and keys.

Roles are Django groups with these names in lower case. Each includes the ones below it. A superuser is an admin.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from django.contrib.auth.models import User

REMEMBERED = "_slackline_role"  # attribute of the user object


@dataclass(frozen=True, slots=True)
class ServicePrincipal:
    """A service account as `request.user` of the control API, with the role and the scopes that it has."""

    token_id: int
    account_id: int
    name: str
    role: str
    scopes: tuple[str, ...]
    is_authenticated: bool = True
    is_active: bool = True
    is_superuser: bool = False

    @property
    def pk(self) -> str:
        return f"service-{self.account_id}"

    def get_username(self) -> str:
        return self.name


class UserRole(IntEnum):
    NONE = 0
    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3


def role_of(user: Any) -> UserRole:
    """The highest role of a user. One query, cached on the user object, which lives for one request.

    A service account has the role of its own. Without either (anonymous, or a tenant's key) it is NONE.
    """
    if isinstance(user, ServicePrincipal):
        return UserRole[user.role.upper()]
    if not isinstance(user, User) or not user.is_active:
        return UserRole.NONE
    if user.is_superuser:
        return UserRole.ADMIN
    role: UserRole | None = getattr(user, REMEMBERED, None)
    if role is None:
        groups = {name.upper() for name in user.groups.values_list("name", flat=True)}
        role = max((each for each in UserRole if each.name in groups), default=UserRole.NONE)
        setattr(user, REMEMBERED, role)
    return role
