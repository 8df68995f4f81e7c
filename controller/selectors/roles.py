"""Which role a person has: viewer reads, operator acts, admin also owns people and keys.

Roles are Django groups of these names (lower case), each including the ones below it; a superuser is an admin.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from django.contrib.auth.models import PermissionsMixin


class Role(IntEnum):
    NONE = 0
    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3


def role_of(user: Any) -> Role:
    """The highest role. One query, remembered on the user object, which lives for one request.

    Whoever is no person of ours (nobody signed in, a tenant's key) has none.
    """
    if not isinstance(user, PermissionsMixin) or not user.is_active:
        return Role.NONE
    if user.is_superuser:
        return Role.ADMIN
    if not hasattr(user, "_slackline_role"):
        groups = {name.upper() for name in user.groups.values_list("name", flat=True)}
        user._slackline_role = max((role for role in Role if role.name in groups), default=Role.NONE)
    return user._slackline_role
