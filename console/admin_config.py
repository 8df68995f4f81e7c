"""The admin site of Django with the rules of `console.admin_site`."""

from __future__ import annotations

from django.contrib.admin.apps import AdminConfig


class RoleAdminConfig(AdminConfig):
    default_site = "console.admin_site.RoleSite"
