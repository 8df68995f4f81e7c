"""One decode stage on its way: its states, what is remembered of it, and the migrator's bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from controller.core.errors import ConfigError
from controller.core.types import Request
from controller.dispatch.disaggregation.placements import Prefilled
from controller.dispatch.lifecycle import LANDED, MAX_PREFILLS, State

MIGRATION_RANKS = ("none", "tpot")
UNEXPLAINED = "transfer_failed"  # its engine does not say whether the KV, the way or itself is at fault


@dataclass(frozen=True, slots=True)
class MigratorConfig:
    """Of each state (see State) how long it may last: `prefilling_timeout_s` beyond the time in which the first token
    is expected, `waiting_timeout_s` since that token, the others since they began. `release_timeout_s`: until a prefill
    instance is asked again to free KV, `release_tries` times in all. `retry_s`: before a request that found no room at
    an engine is placed again, and doubled with each failure where all instances failed it. `max_failures`: broken
    transfers of one request before it is given up. `hold_s`: a request that no placement wants for that long is given
    up where there is no decode instance at all (after its waiting time, if that is less), else it goes where there is
    room, whatever its TPOT; less than the lease for which engines keep KV (30 s). `strangers_hold_s`: the same where
    all that are there are of another model or layout, which time does not mend: only long enough for one that is just
    being started. `strangers_s`: how long that word of a decode instance is believed, before one prefill tries it.
    `scan_limit`: requests of one model looked at that find no room before a pass leaves the rest of them.
    `engine_rank`: what the engine is told about urgency. `link_failures`: transfers failing in a row that close a link,
    for `link_closed_s` at first.
    `link_patience_s`: a request all whose links are down, with nowhere else to prefill it again, waits so long for one
    of them, and is then sent over any; one that could be prefilled elsewhere waits so long for what another that tries
    its link says of it, and one that tries a link and will say nothing closes it to others for no longer. `overlap`:
    where prefill engines give out KV while they compute, a decode stage is placed when its prompt is nearly computed,
    so that its KV moves meanwhile; without it, and at other engines, when the prefill has ended, as HyperFlexis does.
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
    strangers_hold_s: float = 3.0
    strangers_s: float = 60.0
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
        if self.strangers_s < self.strangers_hold_s:  # who waits would ask the same engine again and again
            raise ConfigError("strangers_s must be at least strangers_hold_s", field="strangers_s")
        if self.engine_rank not in MIGRATION_RANKS:
            raise ConfigError(f"engine_rank must be one of {', '.join(MIGRATION_RANKS)}", field="engine_rank")


class Transfer:
    """The decode stage of one request. `target` is set from the placement on, `since` is when its state began."""

    __slots__ = (
        "assumed",
        "due",
        "early",
        "excluded",
        "failures",
        "hopeless",
        "kv_tokens",
        "not_before",
        "overdue_at",
        "paired",
        "prefill_s",
        "since",
        "source",
        "stage",
        "state",
        "strange",
        "target",
        "turned_away",
    )

    def __init__(self, request: Request, source: str, now: float, prefill_s: float = 0.0, paired: bool = False) -> None:
        self.stage = Prefilled(request, now)
        self.source = source
        self.target = ""
        self.state = State.PREFILLING
        self.since = now
        self.kv_tokens = 0
        self.prefill_s, self.paired = prefill_s, paired  # a pair's prefill begins when its decode stage is placed
        self.due = now + prefill_s  # when its first token was expected, at the sending of its prefill
        self.overdue_at = math.inf  # a prefill that has not ended by then is undone
        self.early = False  # its prefill has not ended, and it may be placed already
        self.assumed = False  # committed, as far as anybody knows
        self.failures = 0
        self.hopeless = False  # waits for all others
        self.not_before = -math.inf
        self.excluded: set[str] = set()  # asked again for want of others
        self.strange = False  # when it was last looked at, only decode instances were there that do not read its KV
        self.turned_away = False  # by an engine without room: some tell the prefill engine to free its KV then

    @property
    def request(self) -> Request:
        return self.stage.request

    @property
    def landed(self) -> bool:
        return self.state in LANDED

    @property
    def prefilling(self) -> bool:
        """Its prefill has not ended, and its KV is not at a decode instance."""
        return self.state is State.PREFILLING or (self.early and not self.landed)

    def kv_is_lost(self, reason: str) -> bool:
        """The engine says so; or one that does not say why fails it after it was turned away, or for the second time.
        KV that may be computed no more is not suspected so soon."""
        if reason == UNEXPLAINED:
            return self.turned_away or (self.failures > 0 and self.request.attempts + 1 < MAX_PREFILLS)
        return reason == "kv_lost"

    def begin_early(self, first_at: float) -> None:
        """Before its prefill has ended; the first token is expected at `first_at`."""
        self.early, self.stage, self.kv_tokens = True, Prefilled(self.request, first_at), self.request.prompt_tokens
