"""Experiments as they go on: the newest state of each, by its slug. Truth is in the database."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from channels.db import database_sync_to_async
from django.utils import timezone

from console.consumers.base import LiveConsumer
from controller.core.messages import LIVE_EXPERIMENTS
from controller.models import Experiment
from controller.selectors.experiments import results as selectors
from workers import live

SHOWN_AFTER_END = timedelta(minutes=5)
KEPT = 500
OVER = ("done", "failed", "cancelled")


class ExperimentsConsumer(LiveConsumer):
    topic = "experiments"
    group = LIVE_EXPERIMENTS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._states: dict[str, dict[str, Any]] = {}
        self._unsent: set[str] = set()

    async def mark_watched(self) -> None:
        await live.amark_watched(self.group)

    async def refresh(self) -> None:
        """What pub/sub lost, and what another worker took over, is found again here."""
        for state in await moving():
            self._keep(state)

    def take(self, message: dict[str, Any]) -> bool:
        return self._keep({**message["data"], "waiting": False})

    def _keep(self, state: dict[str, Any]) -> bool:
        known = self._states.get(state["slug"])
        if known == state or (known is not None and known["state"] in OVER and state["state"] not in OVER):
            return False
        if known is not None and state["state"] == known["state"] and state["progress"] < known["progress"]:
            return False  # a late word
        self._states[state["slug"]] = state
        self._unsent.add(state["slug"])
        if len(self._states) > KEPT:
            self._states.pop(next(iter(self._states)))  # the one heard of first: a page shows fewer than these
        return True

    def frame(self, snapshot: bool) -> dict[str, Any]:
        slugs = list(self._states) if snapshot else [slug for slug in self._unsent if slug in self._states]
        self._unsent.clear()
        return {"experiments": [self._states[slug] for slug in slugs]}

    def age_s(self, now: float) -> float | None:
        return 0.0  # nothing happens to most experiments: their state is as new as the connection


@database_sync_to_async
def moving() -> list[dict[str, Any]]:
    return [as_state(row) for row in selectors.moving(timezone.now() - SHOWN_AFTER_END)]


def as_state(row: Experiment) -> dict[str, Any]:
    """`waiting`: running, but its worker has fallen silent; another one takes it over."""
    silent = row.state == "running" and row.lease_until is not None and row.lease_until < timezone.now()
    return {"slug": row.slug, "state": row.state, "progress": row.progress, "step": row.step, "waiting": silent}
