"""Notifies gateways and transfer daemons of a changed configuration.

Gateways also poll the configuration version every half second, and a job tells daemons their policy every few seconds,
so a lost notice delays the change and nothing else.
"""

from __future__ import annotations

import logging

from django.db import DatabaseError, transaction

from controller.selectors.catalogue import flow_settings
from controller.selectors.snapshot import config_version
from workers import live

log = logging.getLogger(__name__)


def announce_config() -> None:
    """Notify gateways and transfer daemons once the transaction has committed. Waits at most twice `live.CALL_S` for
    Redis; never raises."""
    transaction.on_commit(_notify)


def _notify() -> None:
    try:
        live.notify_config(config_version())
        publish_flow_policy()
    except (live.LiveUnavailable, DatabaseError) as error:
        log.info("gateways were not notified of a change: %s", error, extra={"action": "config_notice_lost"})


def publish_flow_policy() -> None:
    """Tell transfer daemons the stored flow policy, which they read each second. Raises LiveUnavailable."""
    row = flow_settings().first()
    live.publish_flow_policy(None if row is None else row.flow_policy)
