"""What `bench-console` looks at: every page of the console, the searches no index answers alone, and the re-judgement.

`tests/benchmarks/console/test_addresses.py` compares it with the console's URL table: a new page needs its row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from django.db.models import Model, QuerySet

    from controller.models import (
        Decision,
        Experiment,
        Instance,
        LaunchTemplate,
        PriorityMapping,
        RequestRecord,
        ScalingPolicy,
        ServiceAccount,
        SLOClass,
        Tenant,
    )

    M = TypeVar("M", bound=Model)

EXPERIMENT = "Two policies at two rates"


class AddressLook(NamedTuple):
    """An address; `posted`: a form that is sent there and changes nothing."""

    path: str
    posted: Mapping[str, Any] | None = None


def prepare() -> None:
    """What the SQL of benchmarks/console/data.py cannot make: an experiment with its result, and a trace."""
    from console.management.demo import PROFILE, TRACE, TRACE_NAME
    from controller.services.access.service_accounts import service_account_create
    from controller.services.actors import Actor
    from controller.services.experiments.commands import experiment_create
    from controller.services.experiments.traces import trace_create
    from controller.services.fleet.launch_templates import shipped_templates_store
    from workers.experiments.runner import next_experiment
    from workers.experiments.shipped_profiles import shipped_profile

    actor = Actor.person("benchmark")
    trace_create(actor=actor, name=TRACE_NAME, content=TRACE.read_bytes())
    spec = {
        "instances": [{"count": 2, "profile": PROFILE, "max_num_seqs": 16, "max_model_len": 8192}],
        "workload": {"kind": "mix", "mix": "4-task", "per_task": 50, "rate": 10.0},
        "rates": [10.0, 20.0],
        "policies": ["slackline", "round_robin"],
    }
    shipped_templates_store()
    service_account_create(actor=actor, name="benchmark", role="viewer", scopes=["read"])
    experiment_create(actor=actor, name=EXPERIMENT, spec=spec, read_profile=shipped_profile)
    while next_experiment():
        pass


def first(rows: QuerySet[M]) -> M:
    """Raises LookupError where there are none."""
    row = rows.first()
    if row is None:
        raise LookupError(f"no {rows.model._meta.verbose_name} in the data")
    return row


class Subjects(NamedTuple):
    """The rows that the pages are about, one of each kind."""

    newest: Sequence[str]  # ids of the two newest requests
    missed: RequestRecord
    decision: Decision
    tenant: Tenant
    slo_class: SLOClass
    mapping: PriorityMapping
    instance: Instance
    policy: ScalingPolicy
    template: LaunchTemplate
    experiment: Experiment
    account: ServiceAccount
    workflow: RequestRecord


def addresses() -> dict[str, AddressLook]:
    """By name. Raises LookupError where the data lacks what a page is about."""
    about = subjects()
    pages = {**traffic_pages(about), **configuration_pages(about), **fleet_pages(about), **record_pages(about)}
    slo_class, mapping = about.slo_class, about.mapping
    posted = {
        "class, last hour re-judged": AddressLook(f"/classes/{slo_class.pk}/preview/", class_form(slo_class)),
        "mapping, last hour re-judged": AddressLook(f"/mappings/{mapping.pk}/preview/", mapping_form(mapping)),
        "flow settings, checked": AddressLook("/flows/settings/preview/", ordering_form()),
    }
    return {name: AddressLook(path) for name, path in pages.items()} | posted


def subjects() -> Subjects:
    from controller.models import (
        Decision,
        Experiment,
        Instance,
        LaunchTemplate,
        PriorityMapping,
        RequestRecord,
        ScalingPolicy,
        ServiceAccount,
        SLOClass,
        Tenant,
    )

    return Subjects(
        newest=list(RequestRecord.objects.order_by("-arrived_at", "-id").values_list("id", flat=True)[:2]),
        missed=first(RequestRecord.objects.filter(attained=False).exclude(slo_class="").order_by("-arrived_at")),
        decision=first(Decision.objects.order_by("-at")),
        tenant=first(Tenant.objects.order_by("pk")),
        slo_class=SLOClass.objects.get(name="interactive", tenant=None),
        mapping=first(PriorityMapping.objects.all()),
        instance=first(Instance.objects.order_by("pk")),
        policy=first(ScalingPolicy.objects.order_by("pk")),
        template=first(LaunchTemplate.objects.order_by("pk")),
        experiment=first(Experiment.objects.filter(kind=Experiment.Kind.EXPERIMENT, state=Experiment.State.DONE)),
        account=first(ServiceAccount.objects.order_by("pk")),
        workflow=first(RequestRecord.objects.exclude(workflow="").order_by("-arrived_at")),
    )


def traffic_pages(about: Subjects) -> dict[str, str]:
    first_id, second_id = about.newest
    return {
        "overview": "/",
        "overview history": "/overview/history/",
        "goodput": "/goodput/",
        "queue": "/queue/",
        "queue, what came of an order": f"/queue/command/all/{32 * '0'}/",
        "requests": "/requests/",
        "workflows": "/workflows/",
        "workflow": f"/workflows/one/?tenant={about.workflow.tenant}&workflow={about.workflow.workflow}",
        "workflow, part": f"/workflows/one/live/?tenant={about.workflow.tenant}&workflow={about.workflow.workflow}",
        "requests, missed of a tenant": f"/requests/?tenant={about.tenant.name}&attained=no",
        "requests, missed of a class": "/requests/?slo_class=interactive&attained=no",
        "requests, refused": "/requests/?outcome=refused",
        "requests, unknown model": "/requests/?model=nobody",
        "requests, unknown id": "/requests/?id=req-nobody",
        "request": f"/requests/{first_id}/",
        "request, missed": f"/requests/{about.missed.id}/",
        "compare": f"/requests/compare/?id={first_id}&id={second_id}",
    }


def configuration_pages(about: Subjects) -> dict[str, str]:
    slo_class, mapping, tenant = about.slo_class, about.mapping, about.tenant
    return {
        "classes": "/classes/",
        "class, new": "/classes/new/",
        "class, change": f"/classes/{slo_class.pk}/",
        "class, history": f"/classes/{slo_class.pk}/history/",
        "class, remove": f"/classes/{slo_class.pk}/remove/",
        "mappings": "/mappings/",
        "mapping, change": f"/mappings/{mapping.pk}/",
        "mapping, history": f"/mappings/{mapping.pk}/history/",
        "tenants": "/tenants/",
        "tenant with its keys": f"/tenants/{tenant.pk}/",
        "tenant, new": "/tenants/new/",
        "tenant, change": f"/tenants/{tenant.pk}/change/",
    }


def fleet_pages(about: Subjects) -> dict[str, str]:
    instance, policy = about.instance, about.policy
    return {
        "fleet": "/fleet/",
        "fleet, part": "/fleet/live/",
        "instance": f"/fleet/instances/{instance.pk}/",
        "instance, role": f"/fleet/instances/{instance.pk}/role/",
        "instance, edit": f"/fleet/instances/{instance.pk}/edit/",
        "instance, log": f"/fleet/instances/{instance.pk}/log/",
        "instance, log, part": f"/fleet/instances/{instance.pk}/log/live/",
        "instance, part": f"/fleet/instances/{instance.pk}/live/?charts=1",
        "launch templates": "/launch-templates/",
        "launch template, new": "/launch-templates/new/",
        "launch template, change": f"/launch-templates/{about.template.pk}/",
        "launch template, remove": f"/launch-templates/{about.template.pk}/remove/",
        "launch template, history": f"/launch-templates/{about.template.pk}/history/",
        "scaling": "/scaling/",
        "scaling, at a moment": f"/scaling/?at={about.missed.arrived_at:%Y-%m-%dT%H:%M:%S}",
        "scaling, part": "/scaling/live/?charts=1",
        "instance, new": "/fleet/new/",
        "instance, start": "/fleet/start/",
        "scaling, new": "/scaling/new/",
        "scaling, change": f"/scaling/{policy.pk}/",
        "scaling, by hand": f"/scaling/{policy.pk}/hold/",
        "scaling, history": f"/scaling/{policy.pk}/history/",
        "lengths": "/lengths/",
        "version history": "/lengths/history/?model=demo",
        "pattern-graphs": "/lengths/graphs/?tenant=demo",
        "flows": "/flows/",
        "flows, part": "/flows/live/1/",
        "flow settings": "/flows/settings/",
        "flow settings, history": "/flows/settings/history/",
    }


def record_pages(about: Subjects) -> dict[str, str]:
    """Decisions, experiments and what goes with them."""
    missed, experiment = about.missed, about.experiment
    hour = f"{missed.arrived_at - timedelta(hours=1):%Y-%m-%dT%H:%M:%S}"
    return {
        "audit": "/audit/",
        "audit, of a kind": "/audit/?kind=slo_class_updated",
        "audit, contains nothing": "/audit/?q=nothing-like-it",
        "audit, what bears on a class": f"/audit/?tenant={missed.tenant}&slo_class={missed.slo_class}&since={hour}",
        "decision": f"/audit/{about.decision.pk}/",
        "experiments": "/experiments/",
        "experiment, new": "/experiments/new/",
        "experiment": f"/experiments/{experiment.slug}/",
        "experiment, CSV": f"/experiments/{experiment.slug}/csv/",
        "experiment, JSON": f"/experiments/{experiment.slug}/json/",
        "traces": "/traces/",
        "sessions": "/sessions/",
        "service accounts": "/service-accounts/",
        "service account": f"/service-accounts/{about.account.pk}/",
        "service account, new": "/service-accounts/new/",
        "service account, change": f"/service-accounts/{about.account.pk}/change/",
        "patterns": "/patterns/",
    }


def class_form(row: Any, **changes: Any) -> dict[str, Any]:
    """As the class form sends it with half the TTFT."""
    names = ("title", "tpot_s", "waiting_time_s", "value", "version")
    typed = {name: getattr(row, name) for name in names}
    return {**typed, "ttft_s": row.ttft_s / 2, "target": row.target * 100, "deadline_s": "", **changes}


def mapping_form(row: Any) -> dict[str, Any]:
    """As the mapping form sends it with every first value at its lower bound."""
    levels = [{**level, "ttft_s": level["ttft_min_s"], "tpot_s": level["tpot_min_s"]} for level in row.levels]
    typed = {name: getattr(row, name) for name in ("window", "window_age_s", "contention", "version")}
    each = {f"levels-{place}-{name}": value for place, level in enumerate(levels) for name, value in level.items()}
    return {**typed, "levels-TOTAL_FORMS": len(levels), "levels-INITIAL_FORMS": 0, **each}


def ordering_form() -> dict[str, Any]:
    """As the form of the flow settings sends it with CALM, while none are stored."""
    return {"flow_policy": "off", "drop_budget": "0", "ordering": "calm", "ordering_options": ""}
