"""Waits for something other than the database."""

from __future__ import annotations

from django.db import connection


def give_back_connection() -> None:
    """Before such a wait: the console has a few connections for all requests, and one that waits must not keep one."""
    if not connection.in_atomic_block:
        connection.close()
