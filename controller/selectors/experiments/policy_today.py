"""What gateways decide by today: their policy set with its settings, and what the flow settings choose for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller.dispatch.policy_sets import with_ordering
from controller.flow.gate import OFF
from controller.selectors import catalogue


def overrides_today(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`overrides`: those that gateways are started with. One query."""
    stored = catalogue.flow_settings().first()
    if stored is None:
        return dict(overrides)
    return with_ordering(overrides, stored.ordering, stored.ordering_options)


def drop_budget_today() -> float:
    """Largest share of the waiting requests that is pruned now. One query."""
    stored = catalogue.flow_settings().first()
    return 0.0 if stored is None else stored.drop_budget


def flow_policy_today() -> str:
    """By which transfer daemons schedule new transfers, OFF if nothing is stored. One query."""
    stored = catalogue.flow_settings().first()
    return OFF if stored is None else stored.flow_policy
