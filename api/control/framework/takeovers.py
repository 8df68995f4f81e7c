"""Gateways and the versions of what is learned from records that they use, in answers of the control API."""

from __future__ import annotations

from datetime import datetime

from rest_framework import serializers

from controller.core.messages import FleetMessage
from controller.selectors.records.takeovers import (
    BEHIND,
    COMING,
    CURRENT,
    SILENT,
    UNKNOWN,
    Takeover,
    Version,
    takeovers,
)
from workers import live

STATES = (CURRENT, COMING, BEHIND, SILENT, UNKNOWN)


class TakeoverRow(serializers.Serializer):
    """One gateway."""

    gateway = serializers.CharField()
    state = serializers.ChoiceField(
        choices=STATES,
        help_text="`current`: it uses the version in force; `coming`: that was published in the last ten seconds; "
        "`behind`: it uses another one or none; `silent`: its report is stale; `unknown`: it does not report this.",
    )
    version = serializers.IntegerField(allow_null=True, help_text="In use; null for none.")
    digest = serializers.CharField(allow_blank=True, help_text="SHA-256 of what it read, hex.")
    taken_at = serializers.DateTimeField(allow_null=True, help_text="In use since, on the gateway's clock.")
    seconds = serializers.FloatField(
        allow_null=True, help_text="From the training of the version in force until the gateway used it."
    )
    problem = serializers.CharField(allow_blank=True, help_text="Why the gateway does not use the newest version.")
    reported_at = serializers.DateTimeField()


def reporting() -> list[FleetMessage] | None:
    """What gateways published lately; None while Redis is unavailable."""
    try:
        return live.read_fleet()
    except live.LiveUnavailable:
        return None


def rows_of(
    fleets: list[FleetMessage] | None,
    what: str,
    subject: str,
    in_force: Version | None,
    now: datetime,
) -> list[Takeover] | None:
    """As `takeovers`; None while Redis is unavailable."""
    return None if fleets is None else takeovers(fleets, what, subject, in_force, now)
