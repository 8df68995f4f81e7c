"""`manage.py grant_database_roles`: give the database users of the processes what they need, and take the rest.

Run by the owner of the tables after `migrate`; `docker/postgres/roles.sh` creates the users. Can be repeated safely.
Where the users do not exist (one database user for all processes), nothing is changed.
"""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand
from django.db import connection, transaction

from controller.postgres.grants import USERS, grant


class Command(BaseCommand):
    """Changes rights only, no rows."""

    help = __doc__

    def handle(self, *args: Any, **options: Any) -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            granted = grant(cursor)
        names = ", ".join(USERS)
        self.stdout.write(f"rights granted to {names}" if granted else f"nothing granted: no users {names}")
