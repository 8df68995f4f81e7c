"""The configuration a gateway serves from: read whole from PostgreSQL, kept in memory and on disk.

The data path never queries the database per request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from controller.core.types import InstanceSpec, LatencyCoefficients, Role


@dataclass(frozen=True, slots=True)
class Entitlements:
    """What a tenant's requests may ask for (`controller.slo.classes`). An empty list allows all; `queue_share` is
    the tenant's largest share of the open requests and their bytes, above 0 and at most 1."""

    allowed_classes: tuple[str, ...] = ()
    allowed_models: tuple[str, ...] = ()
    highest_priority: int = 0  # the smallest number that `priority` may have
    tightest_ttft_s: float | None = None
    tightest_tpot_s: float | None = None
    tightest_deadline_s: float | None = None
    queue_share: float | None = None  # None: the gateway's setting TENANT_QUEUE_SHARE


ALL_ALLOWED = Entitlements()


@dataclass(frozen=True, slots=True)
class TenantConfig:
    id: int
    name: str
    default_class: str | None
    rpm: int | None = None  # requests a minute
    tpm: int | None = None  # prompt + expected output tokens a minute
    max_concurrency: int | None = None
    active: bool = True
    entitled: Entitlements = ALL_ALLOWED
    retention_s: int = 0  # of answers that its requests ask to be kept; 0: none are
    stage_deadlines: str = "share_of_rest"  # of controller.slo.stage_deadlines.STAGE_DEADLINES


@dataclass(frozen=True, slots=True)
class KeyConfig:
    """An API key. Looked up by `sha256` (hex) of the whole key; it expires at an epoch time in seconds."""

    id: int
    tenant: str
    sha256: str
    prefix: str
    scopes: tuple[str, ...] = ("inference",)
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class ClassConfig:
    """An SLO class. `tenant` None: for all tenants; a tenant's own class of the same name has precedence."""

    name: str
    tenant: str | None
    ttft_s: float
    tpot_s: float
    deadline_s: float | None
    waiting_time_s: float
    target: float  # share of requests that must attain, 0..1
    value: float
    may_defer: bool = False


@dataclass(frozen=True, slots=True)
class LevelBounds:
    """Range of targets of one priority level (HyperFlexis sec. 5.2 step 5), and the targets before there is history."""

    ttft_s: float
    tpot_s: float
    ttft_min_s: float
    ttft_max_s: float
    tpot_min_s: float
    tpot_max_s: float


@dataclass(frozen=True, slots=True)
class MappingConfig:
    """A priority-to-SLO mapping; level 0 is the most urgent. `contention` names the lower-bound rule (slo.mapping)."""

    tenant: str | None
    levels: tuple[LevelBounds, ...]
    window: int = 1000
    window_age_s: float = 300.0
    contention: str = "relax_to_next_higher"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    name: str
    aliases: tuple[str, ...] = ()
    context_tokens: int = 4096
    chars_per_token: float = 4.0  # calibrated estimate
    tokenizer: str = ""  # path of a tokenizer.json on the gateway's host; "": prompt lengths are estimated


@dataclass(frozen=True, slots=True)
class ComingConfig:
    """An instance that starts and will take whole requests or their prefill.

    `not_before` (epoch seconds): it is not started earlier; 0: at once. `serves_at` (epoch seconds): when it is likely
    to serve, by the last starts of its launch template; 0: not known.
    """

    id: str
    model: str
    not_before: float = 0.0
    serves_at: float = 0.0


@dataclass(frozen=True, slots=True)
class GatewaySnapshot:
    version: int
    tenants: tuple[TenantConfig, ...] = ()
    keys: tuple[KeyConfig, ...] = ()
    classes: tuple[ClassConfig, ...] = ()
    mappings: tuple[MappingConfig, ...] = ()
    models: tuple[ModelConfig, ...] = ()
    instances: tuple[InstanceSpec, ...] = ()
    draining: tuple[str, ...] = ()  # ids of instances that get no new requests
    coming: tuple[ComingConfig, ...] = ()
    on_demand: tuple[str, ...] = ()  # models of which a scaling policy starts an instance once a request waits for one
    telemetry_period_s: float = 1.0
    ordering: str = ""  # of waiting requests; "": as the gateway was started
    ordering_options: dict[str, Any] = field(default_factory=dict)
    pruning: bool = False  # whether the coordinator of pruning is to know the queues


def _tenant(item: dict[str, Any]) -> TenantConfig:
    entitled = dict(item.get("entitled") or {})  # absent in a file of an older release
    for name in ("allowed_classes", "allowed_models"):
        entitled[name] = tuple(entitled.get(name, ()))
    return TenantConfig(**{**item, "entitled": Entitlements(**entitled)})


def snapshot_from_json(raw: dict[str, Any]) -> GatewaySnapshot:
    """The inverse of `dataclasses.asdict` after JSON (lists become tuples, strings become enums)."""
    instances = []
    for item in raw.get("instances", ()):
        data = dict(item)
        data["role"] = Role(data.get("role", Role.COLLOCATED))
        if data.get("latency") is not None:
            latency = data["latency"]
            data["latency"] = (
                LatencyCoefficients(**latency) if isinstance(latency, dict) else LatencyCoefficients(*latency)
            )
        instances.append(InstanceSpec(**data))
    mappings = [
        MappingConfig(**{**item, "levels": tuple(LevelBounds(**level) for level in item["levels"])})
        for item in raw.get("mappings", ())
    ]
    return GatewaySnapshot(
        version=raw["version"],
        tenants=tuple(_tenant(item) for item in raw.get("tenants", ())),
        keys=tuple(KeyConfig(**{**item, "scopes": tuple(item["scopes"])}) for item in raw.get("keys", ())),
        classes=tuple(ClassConfig(**item) for item in raw.get("classes", ())),
        mappings=tuple(mappings),
        models=tuple(ModelConfig(**{**item, "aliases": tuple(item["aliases"])}) for item in raw.get("models", ())),
        instances=tuple(instances),
        draining=tuple(raw.get("draining", ())),
        coming=tuple(ComingConfig(**item) for item in raw.get("coming", ())),
        on_demand=tuple(raw.get("on_demand", ())),  # absent in a file of an older release
        telemetry_period_s=raw.get("telemetry_period_s", 1.0),
        ordering=raw.get("ordering", ""),
        ordering_options=dict(raw.get("ordering_options", {})),
        pruning=raw.get("pruning", False),  # absent in a file of an older release
    )


@dataclass(slots=True)
class FleetState:
    """One instance in the gateway's shadow state, published for the scaler and the pages."""

    id: str
    model: str
    role: str
    state: str  # up | draining | down | asleep
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_usage: float = 0.0
    slots: int = 0
    utilisation: float = 0.0  # 0..1, the largest of slots, KV and computing time in use
    telemetry_age_s: float | None = None
    sent_total: int = 0
    kept_kv: int = 0  # prompts that were computed here and whose KV is still to be pulled or freed
    needed: bool = False  # of all instances it alone can keep the targets of some recent request
    speed: float = 0.0  # reference requests/s of its stage when full; 0: not known
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def outstanding(self) -> int:
        """Requests that would lose work if the instance stopped now."""
        return self.running + self.waiting + self.kept_kv
