"""Telling gateways at once that their configuration changed.

They look for themselves within half a second, so a notice that gets lost costs that time and never the change.
"""

from __future__ import annotations

import logging

from django.db import DatabaseError, transaction

from controller.selectors.snapshot import config_version
from workers import live

log = logging.getLogger(__name__)


def announce_config() -> None:
    """After the change's transaction has committed. Waits at most `live.CALL_S` for Redis, and fails nothing."""
    transaction.on_commit(_tell)


def _tell() -> None:
    try:
        live.notify_config(config_version())
    except (live.LiveUnavailable, DatabaseError) as error:
        log.info("gateways were not told of a change: %s", error, extra={"action": "config_notice_lost"})
