"""Who gets into the admin site: people with the staff flag and a role, as everywhere else in the console."""

from __future__ import annotations

from django.contrib.admin import AdminSite
from django.http import HttpRequest

from controller.selectors.roles import UserRole, role_of


class RoleSite(AdminSite):
    """The flag alone opens nothing: it adds this site to what a role may read, and outlives a role that is taken
    away."""

    site_header = site_title = "Slackline"

    def has_permission(self, request: HttpRequest) -> bool:
        return super().has_permission(request) and role_of(request.user) >= UserRole.VIEWER
