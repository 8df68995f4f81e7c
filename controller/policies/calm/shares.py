"""What each tenant has been served of late, for the fairness of sec. 4.3 (`choice.with_fairness`).

Served is work: slot-seconds, which fade with each frame in which the engine works, so that a tenant that was away has
little credit and one that asked for much is forgiven. `Fair` is 1 for a tenant that was served no more than an equal
share of what those that ask now were served, and falls to 0 for one that was served half as much again. So CALM's own
order holds among all that got no more than their share, whatever they got less.
"""

from __future__ import annotations

from collections.abc import Iterable

KEEPS = 0.98  # of a share, with each frame: half is gone after 34
OVER = 0.5  # beyond an equal share, as a part of it, from which fairness is 0
LEAST_S = 1e-6  # slot-seconds below which a tenant is forgotten


class TenantShares:
    """Slot-seconds by tenant. A tenant that is not known is called ""."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._used)

    def use(self, tenant: str, slot_s: float) -> None:
        self._used[tenant] = self._used.get(tenant, 0.0) + slot_s

    def fade(self, frames: int) -> None:
        """So many frames have passed."""
        keeps = KEEPS**frames
        self._used = {tenant: used * keeps for tenant, used in self._used.items() if used * keeps > LEAST_S}

    def fair(self, tenants: Iterable[str]) -> dict[str, float] | None:
        """By tenant, of those that ask now. None if these are fewer than two, so that there is nothing to share."""
        asking = set(tenants)
        if len(asking) < 2:
            return None
        used = {tenant: self._used.get(tenant, 0.0) for tenant in asking}
        equal = sum(used.values()) / len(used)
        if equal <= 0:
            return dict.fromkeys(asking, 1.0)
        return {tenant: min(1.0, max(0.0, 1.0 - (each / equal - 1.0) / OVER)) for tenant, each in used.items()}
