"""The configuration that a gateway serves from, and the version that tells whether it changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.conf import settings
from django.db.models import BooleanField, Exists, ExpressionWrapper, OuterRef, Q
from django.db.models.functions import Now

from controller.core.snapshot import (
    ClassConfig,
    ComingConfig,
    Entitlements,
    GatewaySnapshot,
    KeyConfig,
    LevelBounds,
    MappingConfig,
    ModelConfig,
    TenantConfig,
)
from controller.core.types import InstanceSpec, LatencyCoefficients, Role
from controller.engine.process_spec import start_after, whole_number
from controller.engine.start_steps import PROCESS
from controller.models import (
    Action,
    ApiKey,
    ConfigVersion,
    FlowSettings,
    Instance,
    PriorityMapping,
    ServedModel,
    SLOClass,
    Tenant,
)
from controller.models.fleet import Weights
from controller.policies.batching import BATCHINGS, selects
from controller.policies.by_stage import batching_of
from controller.postgres.clock import ahead_of_host
from controller.selectors.fleet.latency_fits import Fits, active_fits
from controller.selectors.fleet.scaling import cold_starts_s, models_on_demand


def config_version() -> int:
    """One row by its key; 0 before that row exists."""
    return ConfigVersion.objects.filter(pk=1).values_list("version", flat=True).first() or 0


def gateway_snapshot() -> GatewaySnapshot:
    """Ten queries, one more with scaling policies and one while instances start from launch templates. The version is
    read first, so that a change in the meantime makes the next poll read again."""
    version = config_version()
    rows = _instances()
    ahead_s = ahead_of_host(rows[0].asked_at) if rows else 0.0
    instances = [row for row in rows if row.now_serves]
    fits = active_fits()
    settings_row = FlowSettings.objects.first()
    return GatewaySnapshot(
        version=version,
        tenants=tuple(_tenant(row) for row in Tenant.objects.select_related("default_class")),
        keys=tuple(_key(row) for row in _usable_keys()),
        classes=tuple(_class(row) for row in SLOClass.objects.select_related("tenant")),
        mappings=tuple(_mapping(row) for row in PriorityMapping.objects.select_related("tenant")),
        models=tuple(_model(row) for row in ServedModel.objects.all()),
        instances=tuple(_instance(row, fits) for row in instances),
        draining=tuple(row.id for row in instances if _drains(row)),
        coming=tuple(_coming([row for row in rows if row.switches_role or not row.now_serves], ahead_s)),
        on_demand=tuple(models_on_demand()),
        telemetry_period_s=settings.TELEMETRY_PERIOD_S,
        pruning=settings_row is not None and settings_row.drop_budget > 0,
        ordering="" if settings_row is None else settings_row.ordering,
        ordering_options={} if settings_row is None else settings_row.ordering_options,
    )


def _instances() -> list[Any]:
    """Instances that serve (`now_serves`) and instances on their way, in one query: one that became ready between two
    queries would be in neither, and requests that wait for it would be refused. `switches_role`: its engine is being
    switched to another role, and must be empty first."""
    orders = Action.objects.filter(instance=OuterRef("pk"), kind=Action.Kind.ROLE_SWITCH, state__in=Action.OPEN)
    serves = Instance.serves()
    return list(
        Instance.objects.filter(serves | _on_its_way())
        .select_related("model")
        .annotate(now_serves=ExpressionWrapper(serves, BooleanField()), switches_role=Exists(orders) & serves)
        .annotate(asked_at=Now())
    )


def _on_its_way() -> Q:
    """Whether it should run, is not ready yet, and was started or woken. A warm spare waits for an action."""
    starts = Q(observed_state__in=[Instance.Observed.PENDING, Instance.Observed.STARTING])
    wakes = Q(observed_state=Instance.Observed.READY, weights=Weights.WAKING)
    wanted = Q(desired_state=Instance.Desired.RUNNING) & ~Q(role=Role.DECODE.value)
    return wanted & ((starts & Q(weights__in=[Weights.PRESENT, Weights.LOADING])) | wakes)


def _coming(rows: Sequence[Any], ahead_s: float) -> Iterator[ComingConfig]:
    """One query if one of them may be predicted. Starts are stored by PostgreSQL's clock, which is so much ahead of
    this host's, and told by this host's."""
    took = cold_starts_s(row for row in rows if _predictable(row))
    for row in rows:
        took_s = took.get((row.model_id, row.template_id)) if _predictable(row) else None
        serves_at = 0.0 if took_s is None else _began(row) + took_s - ahead_s
        yield ComingConfig(row.pk, row.model.name, start_after(row.spec) or 0.0, serves_at)


def _predictable(row: Any) -> bool:
    """Whether this is its first start, and nothing keeps it from it. What waits for a place says so in its error, and
    nobody knows when it gets one."""
    waits = row.observed_state == Instance.Observed.PENDING and bool(row.error)
    return not (row.now_serves or row.ready_at is not None or row.weights != Weights.PRESENT or waits)


def _began(row: Any) -> float:
    """When its process started, or is going to."""
    return row.start_steps.get(PROCESS) or max(row.created_at.timestamp(), start_after(row.spec) or 0.0)


def _usable_keys() -> list[ApiKey]:
    keys = ApiKey.objects.usable().filter(tenant__state=Tenant.State.ACTIVE)
    return list(keys.select_related("tenant"))


def _tenant(row: Tenant) -> TenantConfig:
    return TenantConfig(
        id=row.pk,
        name=row.name,
        default_class=row.default_class.name if row.default_class else None,
        rpm=row.rpm,
        tpm=row.tpm,
        max_concurrency=row.max_concurrency,
        active=row.state == Tenant.State.ACTIVE,
        entitled=Entitlements(
            allowed_classes=tuple(row.allowed_classes),
            allowed_models=tuple(row.allowed_models),
            highest_priority=row.highest_priority,
            tightest_ttft_s=row.tightest_ttft_s,
            tightest_tpot_s=row.tightest_tpot_s,
            tightest_deadline_s=row.tightest_deadline_s,
            queue_share=row.queue_share,
        ),
        retention_s=row.retention_s,
        stage_deadlines=row.stage_deadlines,
    )


def _key(row: ApiKey) -> KeyConfig:
    return KeyConfig(
        id=row.pk,
        tenant=row.tenant.name,
        sha256=row.sha256,
        prefix=row.prefix,
        scopes=tuple(row.scopes),
        expires_at=row.expires_at.timestamp() if row.expires_at else None,
    )


def _class(row: SLOClass) -> ClassConfig:
    return ClassConfig(
        name=row.name,
        tenant=row.tenant.name if row.tenant else None,
        ttft_s=row.ttft_s,
        tpot_s=row.tpot_s,
        deadline_s=row.deadline_s,
        waiting_time_s=row.waiting_time_s,
        target=row.target,
        value=row.value,
        may_defer=row.may_defer,
    )


def _mapping(row: PriorityMapping) -> MappingConfig:
    return MappingConfig(
        tenant=row.tenant.name if row.tenant else None,
        levels=tuple(LevelBounds(**level) for level in row.levels),
        window=row.window,
        window_age_s=row.window_age_s,
        contention=row.contention,
    )


def _model(row: ServedModel) -> ModelConfig:
    return ModelConfig(
        name=row.name,
        aliases=tuple(row.aliases),
        context_tokens=row.context_tokens,
        chars_per_token=row.chars_per_token,
        tokenizer=row.tokenizer,
    )


def _instance(row: Instance, fits: Fits) -> InstanceSpec:
    fit = fits.of(row)
    # Of other engines nothing follows from a role, and what is noted of one may name no batching policy of ours.
    started = Role(row.role_at_start) if row.backend == "reference" else Role.COLLOCATED
    batching = batching_of(row.spec, started)
    return InstanceSpec(
        id=row.id,
        model=row.model.name,
        url=row.url,
        backend=row.backend,
        role=Role(row.role),
        max_num_seqs=row.configured_seqs,
        kv_capacity_tokens=whole_number(row.spec, "kv_capacity_tokens"),
        max_model_len=whole_number(row.spec, "max_model_len") or row.model.context_tokens,
        unit_cost=row.unit_cost,
        latency=LatencyCoefficients(**fit.coefficients) if fit else None,
        selects=batching is not None and batching in BATCHINGS and selects(batching),
        first_token_with_kv=row.backend == "reference",
        key=row.key,
        labels={"provisioner": row.provisioner, "device_kind": row.device_kind},
    )


def _drains(row: Any) -> bool:
    drained = row.desired_state == Instance.Desired.DRAINING or row.observed_state == Instance.Observed.DRAINING
    return drained or row.weights == Weights.LEAVING or row.switches_role
