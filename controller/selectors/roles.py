"""Which role a person has: viewer reads, operator acts, admin also owns people and keys.

Roles are Django groups of these names (lower case), each including the ones below it; a superuser is an admin.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from django.contrib.auth.models import User

REMEMBERED = "_slackline_role"  # attribute of the user object


class Role(IntEnum):
    NONE = 0
    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3


def role_of(user: Any) -> Role:
    """The highest role. One query, remembered on the user object, which lives for one request.

    Whoever is no person of ours (nobody signed in, a tenant's key) has none.
    """
    if not isinstance(user, User) or not user.is_active:
        return Role.NONE
    if user.is_superuser:
        return Role.ADMIN
    role: Role | None = getattr(user, REMEMBERED, None)
    if role is None:
        groups = {name.upper() for name in user.groups.values_list("name", flat=True)}
        role = max((each for each in Role if each.name in groups), default=Role.NONE)
        setattr(user, REMEMBERED, role)
    return role
