"""Notifies gateways of a changed configuration.

Gateways also poll the configuration version every half second, so a lost notice delays the change and nothing else.
"""

from __future__ import annotations

import logging

from django.db import DatabaseError, transaction

from controller.selectors.snapshot import config_version
from workers import live

log = logging.getLogger(__name__)


def announce_config() -> None:
    """Notify the gateways once the transaction has committed. Waits at most `live.CALL_S` for Redis; never raises."""
    transaction.on_commit(_notify)


def _notify() -> None:
    try:
        live.notify_config(config_version())
    except (live.LiveUnavailable, DatabaseError) as error:
        log.info("gateways were not notified of a change: %s", error, extra={"action": "config_notice_lost"})
