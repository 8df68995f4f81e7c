"""Settings of a migrator: how long each state of a transfer may last, and how decode stages are ranked."""

from __future__ import annotations

from dataclasses import dataclass, fields

from controller.core.errors import ConfigError

MIGRATION_RANKS = ("none", "tpot", "slot")


@dataclass(frozen=True, slots=True)
class MigratorConfig:
    """Settings of a migrator.

    Time-outs, one for each state (see State): `prefilling_timeout_s` counts from when the first token is expected,
    `waiting_timeout_s` from that token, the others from when the state began. `release_timeout_s`: until a prefill
    instance is told again to free KV, `release_tries` times in all.

    `retry_s`: before a request that found no room at an engine is placed again; doubled with each failure once all
    instances failed it. A model for which nothing happened is examined again after it. `max_failures`: failed
    transfers of one request before it is given up. `hold_s`: how long a request may wait for a placement. Then it goes
    wherever there is room, whatever its TPOT; without any decode instance it is given up, after its waiting time if
    that is less. Less than the lease for which engines keep KV (30 s).

    `incompatible_hold_s`: the same where all decode instances are incompatible peers, which time does not mend: only
    long enough for one that is being started. `incompatible_s`: how long two instances count as incompatible before one
    prefill tries again.

    `scan_limit`: a pass leaves a model's requests after this many that find no room. `engine_rank`: what the engine is
    told about urgency: the TPOT target (`tpot`), or by when the request has to have its slot (`slot`). `link_failures`:
    transfers that fail in a row until a link is closed, for `link_closed_s` at first. `link_patience_s` is how long
    - a request whose links are all down, and that cannot be prefilled elsewhere, waits before it is sent over any;
    - one that could be prefilled elsewhere waits for the result of another that tries its link;
    - a link stays closed to others while one tries it whose engine will report nothing.

    `overlap`: where prefill engines give out KV while they compute, a decode stage is placed when its prompt is nearly
    computed, so that its KV moves meanwhile. Without it, and at other engines, it is placed when the prefill has ended,
    as in HyperFlexis.
    """

    prefilling_timeout_s: float = 120.0
    waiting_timeout_s: float = 300.0
    placed_timeout_s: float = 5.0
    reserved_timeout_s: float = 10.0
    moving_timeout_s: float = 30.0
    release_timeout_s: float = 2.0
    release_tries: int = 3
    retry_s: float = 0.05
    max_failures: int = 6
    hold_s: float = 25.0
    incompatible_hold_s: float = 3.0
    incompatible_s: float = 60.0
    scan_limit: int = 16
    engine_rank: str = "tpot"
    link_failures: int = 3
    link_closed_s: float = 2.0
    link_patience_s: float = 2.0
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self) if each.name.endswith("_s")):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive seconds", field=name)
        for name in ("max_failures", "scan_limit", "link_failures", "release_tries"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", field=name)
        if self.incompatible_s < self.incompatible_hold_s:  # or a waiting request would try the same engine forever
            raise ConfigError("incompatible_s must be at least incompatible_hold_s", field="incompatible_s")
        if self.engine_rank not in MIGRATION_RANKS:
            raise ConfigError(f"engine_rank must be one of {', '.join(MIGRATION_RANKS)}", field="engine_rank")
