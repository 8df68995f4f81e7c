"""What gateways decide by today: their policy set with its settings, and the ordering that the flow settings choose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller.dispatch.policy_sets import with_ordering
from controller.selectors import catalogue


def overrides_today(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`overrides`: those that gateways are started with. One query."""
    stored = catalogue.flow_settings().first()
    if stored is None:
        return dict(overrides)
    return with_ordering(overrides, stored.ordering, stored.ordering_options)
