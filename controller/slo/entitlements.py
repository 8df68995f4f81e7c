"""What a tenant may ask for: classes, models, priorities and the tightest targets. The operator sets these per tenant.

They apply to what a request names itself. Targets that come from a class or a priority mapping are the operator's own
choice, and are bounded by `allowed_classes` and `highest_priority`.
"""

from __future__ import annotations

from controller.core.errors import ConfigError
from controller.core.snapshot import Entitlements
from controller.slo.classes import SloFields

# The client's field, the entitlement that bounds it from below, and its unit.
FLOORS = (
    ("target_ttft", "tightest_ttft_s"),
    ("target_tbt", "tightest_tpot_s"),
    ("deadline", "tightest_deadline_s"),
)


class NotEntitled(ConfigError):
    """The tenant may not ask for this; `field` names the field of the request."""

    def __init__(self, field: str, entitlement: str, allowed: str) -> None:
        super().__init__(f"{field}: this tenant's entitlement {entitlement} allows {allowed}", field=field)
        self.entitlement = entitlement


def check_fields(asked: SloFields, entitled: Entitlements) -> None:
    """Raises NotEntitled for the first field of the request that the tenant may not use like this."""
    name, priority = asked.slo_class, asked.priority
    if name is not None and entitled.allowed_classes and name not in entitled.allowed_classes:
        raise NotEntitled("slo_class", "allowed_classes", _listed(entitled.allowed_classes))
    if priority is not None and priority < entitled.highest_priority:
        most = entitled.highest_priority
        raise NotEntitled("priority", "highest_priority", f"{most} and above (0 is the highest priority)")
    for field, floor in FLOORS:
        value, least = getattr(asked, field), getattr(entitled, floor)
        if value is not None and least is not None and value < least:
            raise NotEntitled(field, floor, f"{least:g} s or more")


def check_model(model: str, entitled: Entitlements) -> None:
    """Raises NotEntitled. `model`: its name, not an alias."""
    if entitled.allowed_models and model not in entitled.allowed_models:
        raise NotEntitled("model", "allowed_models", _listed(entitled.allowed_models))


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)
