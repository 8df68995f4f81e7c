"""Which instances only prefill or only decode, and what the dispatcher hears of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from controller.core import events as ev
from controller.core.types import Role


class Roles:
    """By instance, as configured; of those that are there."""

    def __init__(self) -> None:
        self._roles: dict[str, Role] = {}

    def __len__(self) -> int:
        return len(self._roles)

    def __iter__(self) -> Iterator[str]:
        return iter(self._roles)

    def prefills(self, instance_id: str) -> bool:
        return self._roles.get(instance_id) is Role.PREFILL

    def for_dispatcher(self, events: Sequence[ev.Event]) -> Sequence[ev.Event]:
        """Learn of roles; decode instances are the migrator's: one that becomes one is gone for the dispatcher."""
        if not any(isinstance(event, ev.InstanceUp | ev.InstanceDown) for event in events):
            return events
        return [self._heard(event) for event in events]

    def _heard(self, event: ev.Event) -> ev.Event:
        if isinstance(event, ev.InstanceDown):
            self._roles.pop(event.instance_id, None)
        elif isinstance(event, ev.InstanceUp):
            name, role = event.spec.id, event.spec.role
            if role is Role.COLLOCATED:
                self._roles.pop(name, None)
            else:
                self._roles[name] = role
            if role is Role.DECODE:
                return ev.InstanceDown(name)
        return event
