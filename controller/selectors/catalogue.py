"""Lists of configured objects, with the names of related ones. `of`: id of the tenant that may see them; None: all."""

from __future__ import annotations

from datetime import timedelta

from django.db.models import (
    Count,
    ExpressionWrapper,
    F,
    FloatField,
    IntegerField,
    OuterRef,
    Q,
    QuerySet,
    Subquery,
    TextField,
    Value,
)
from django.db.models.functions import Coalesce
from django.utils import timezone

from controller.models import (
    Action,
    ApiKey,
    Device,
    FlowSettings,
    Host,
    Instance,
    LaunchTemplate,
    Link,
    PriorityMapping,
    ScalingPolicy,
    ServedModel,
    SLOClass,
    Tenant,
    Transfer,
)
from controller.models.tenants import secret_digest

LATELY = timedelta(days=1)  # transfers of this time are summed up for a link


def tenants(*, of: int | None = None) -> QuerySet[Tenant]:
    rows = Tenant.objects.select_related("default_class")
    return rows if of is None else rows.filter(pk=of)


def flow_settings() -> QuerySet[FlowSettings]:
    """One row, or none yet."""
    return FlowSettings.objects.all()


def api_keys(*, of: int | None = None, usable: bool | None = None) -> QuerySet[ApiKey]:
    """`usable`: only keys that are neither revoked nor expired (True), or only the others (False)."""
    rows = ApiKey.objects.select_related("tenant")
    if usable is not None:
        good = ApiKey.objects.usable().values("pk")
        rows = rows.filter(pk__in=good) if usable else rows.exclude(pk__in=good)
    return rows if of is None else rows.filter(tenant=of)


def key_of_secret(secret: str) -> ApiKey | None:
    """The key with this secret, unless it is revoked or expired, or its tenant is suspended."""
    rows = ApiKey.objects.usable().select_related("tenant")
    return rows.filter(sha256=secret_digest(secret), tenant__state=Tenant.State.ACTIVE).first()


def slo_classes(*, of: int | None = None) -> QuerySet[SLOClass]:
    """A tenant sees its own and the shared ones."""
    rows = SLOClass.objects.select_related("tenant")
    return rows if of is None else rows.filter(_own_or_shared(of))


def priority_mappings(*, of: int | None = None) -> QuerySet[PriorityMapping]:
    """A tenant sees its own and the shared one."""
    rows = PriorityMapping.objects.select_related("tenant")
    return rows if of is None else rows.filter(_own_or_shared(of))


def served_models() -> QuerySet[ServedModel]:
    return ServedModel.objects.all()


def hosts() -> QuerySet[Host]:
    return Host.objects.all()


def devices() -> QuerySet[Device]:
    return Device.objects.select_related("host")


def links() -> QuerySet[Link]:
    """Links between hosts with a summary of their transfers of the last day: `moved`, `failed`, `measured_bytes_s` (not
    counting time in which the transfer was held) and `last_error`."""
    lately = Transfer.objects.filter(link=OuterRef("pk"), recorded_at__gt=timezone.now() - LATELY)
    done = lately.filter(state=Transfer.State.DONE, seconds__gt=0, bytes__gt=0).order_by("-id")
    timed = done.filter(seconds__gt=F("held_s"))
    failed = lately.filter(state=Transfer.State.FAILED).order_by("-id")
    speed = ExpressionWrapper(F("bytes") / (F("seconds") - F("held_s")), output_field=FloatField())
    return Link.objects.select_related("source", "target").annotate(
        moved=_count(done),
        failed=_count(failed),
        measured_bytes_s=Subquery(timed.annotate(speed=speed).values("speed")[:1]),
        last_error=Coalesce(Subquery(failed.values("error")[:1]), Value(""), output_field=TextField()),
    )


def transfers() -> QuerySet[Transfer]:
    return Transfer.objects.select_related("link__source", "link__target")


def _count(rows: QuerySet[Transfer]) -> Coalesce:
    counted = rows.order_by().values("link").annotate(n=Count("pk")).values("n")
    return Coalesce(Subquery(counted, output_field=IntegerField()), 0)


def launch_templates() -> QuerySet[LaunchTemplate]:
    return LaunchTemplate.objects.order_by("name")


def instances(*, live: bool | None = None) -> QuerySet[Instance]:
    """`live`: only those that should run or still do (True), or only the others (False)."""
    rows = Instance.objects.select_related("model", "host", "template")
    if live is not None:
        there = Instance.objects.live().values("pk")
        rows = rows.filter(pk__in=there) if live else rows.exclude(pk__in=there)
    return rows


def actions() -> QuerySet[Action]:
    return Action.objects.all()


def scaling_policies() -> QuerySet[ScalingPolicy]:
    return ScalingPolicy.objects.select_related("model")


def targets() -> dict[tuple[str | None, str], float]:
    """The target attainment of each class, by tenant name (None: shared) and class name."""
    return {
        (owner, name): share for owner, name, share in SLOClass.objects.values_list("tenant__name", "name", "target")
    }


def values() -> dict[tuple[str | None, str], float]:
    """The value of one request of each class, by tenant name (None: shared) and class name."""
    return {
        (owner, name): worth for owner, name, worth in SLOClass.objects.values_list("tenant__name", "name", "value")
    }


def slo_class_for(*, name: str, tenant: Tenant | None) -> SLOClass | None:
    """The class a tenant means by this name: its own, else the shared one."""
    owners = Q(tenant__isnull=True) if tenant is None else _own_or_shared(tenant.pk)
    found = SLOClass.objects.filter(owners, name=name)
    return min(found, key=lambda row: row.tenant_id is None, default=None)


def _own_or_shared(tenant_id: int) -> Q:
    return Q(tenant=tenant_id) | Q(tenant__isnull=True)
