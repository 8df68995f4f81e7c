"""The context of one request: its model's scalers at that time, its class, and related decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from django.db.models import Q
from django.urls import reverse
from django.utils.http import urlencode

from console.panels.history import NO_CLASS
from controller.models import Decision, RequestRecord, ScalingPolicy, ScalingSample, SLOClass
from controller.selectors.fleet import scaling
from controller.selectors.records import causes, decisions
from controller.wording.request_steps import never_decoded_s
from controller.wording.scaling import why
from controller.wording.sentences import sentence
from controller.wording.vocabulary import class_name

AROUND = timedelta(seconds=60)  # before its arrival and after its end
SECOND = timedelta(seconds=1)
SHOWN_BEFORE, SHOWN_AFTER = 10, 5
BATCHES = 3
CLASSES = 5
INSTANCES = 5


class ScalerThen(NamedTuple):
    """`policy` with its values of that time; `then`: the sample near the moment, None if nothing was recorded."""

    policy: ScalingPolicy
    then: ScalingSample | None
    why: str


@dataclass(frozen=True, slots=True)
class RequestContext:
    """`moment`: when its waiting ended, with or without a place on an engine."""

    moment: datetime
    scaling_url: str
    decisions_url: str
    scalers: list[ScalerThen]
    slo_class: SLOClass | None
    instances: list[tuple[str, str]]  # label and id
    decisions: list[tuple[Decision, str]]


def around(row: RequestRecord) -> RequestContext:
    """At most five queries."""
    waited_s = row.queue_s if row.queue_s is not None and never_decoded_s(row) is None else row.e2e_s or 0.0
    moment = row.arrived_at + timedelta(seconds=waited_s)
    since = row.arrived_at - AROUND
    until = row.arrived_at + timedelta(seconds=row.e2e_s or 0.0) + AROUND
    bounds = {"since": _second(since), "until": _second(until)}
    whom = {"tenant": row.tenant, "slo_class": row.slo_class or NO_CLASS}
    return RequestContext(
        moment=moment,
        scaling_url=f"{reverse('scaling')}?{urlencode({'at': _second(moment)})}",
        decisions_url=f"{reverse('audit')}?{urlencode(whom | bounds)}",
        scalers=_scalers(row.model, moment),
        slo_class=_class_of(row),
        instances=_instances(row),
        decisions=[(each, sentence_for(each, [_key(row)])) for each in _near(row, since, until)],
    )


def _scalers(model: str, moment: datetime) -> list[ScalerThen]:
    policies = scaling.as_of(scaling.policies(model=model), moment)
    samples = scaling.samples_at(at=moment, model=model) if policies else {}
    # No scaler evaluates a disabled policy: any sample near the moment is from before it was disabled.
    found = [(policy, samples.get(policy.pk) if policy.enabled else None) for policy in policies]
    return [ScalerThen(policy, then, why(policy, then, policy.held(then.at)) if then else "") for policy, then in found]


def _class_of(row: RequestRecord) -> SLOClass | None:
    """The class as it is now, if it still exists: the tenant's own, else the common one."""
    owners = Q(tenant__isnull=True) | Q(tenant__name=row.tenant)
    found = SLOClass.objects.filter(owners, name=row.slo_class) if row.slo_class else SLOClass.objects.none()
    return min(found, key=lambda each: each.tenant_id is None, default=None)


def _instances(row: RequestRecord) -> list[tuple[str, str]]:
    """The instances that served it, else those that its last decision rejected."""
    label = "Instance" if never_decoded_s(row) is None else "Prefill instance"
    found = [(label, row.instance), ("Prefill instance", row.prefill_instance)]
    served = [(what, name) for what, name in found if name]
    last = row.decisions[-1] if row.decisions else {}
    return served or [("Instance", name) for name in last.get("rejected") or {}]


def _near(row: RequestRecord, since: datetime, until: datetime) -> list[Decision]:
    """Oldest first: its scalers' earlier decisions that were still in force, then those nearest to the request."""
    about = causes.ClassTraffic(row.tenant, row.slo_class, (_key(row),), (row.model,))
    near = decisions.search(since=since, until=until, bearing=causes.bearing_on(about))
    ended = until - AROUND
    refusals = near.filter(kind="refusals", at__gte=ended).order_by("at", "id")[:BATCHES]  # includes its own
    held = causes.lasting((row.model,), since)
    others = near.exclude(kind="refusals")
    after = others.filter(at__gt=ended).order_by("at", "id")[:SHOWN_AFTER]
    found = others.filter(at__lte=ended)[:SHOWN_BEFORE].union(after, refusals, *held, all=True)
    return sorted(found, key=lambda each: (each.at, each.pk))


def _key(row: RequestRecord) -> str:
    return f"{row.tenant}/{row.slo_class}"


def sentence_for(decision: Decision, keys: Sequence[str]) -> str:
    """Its sentence; for a gateway's batch of refusals also how many were of these classes ("tenant/class")."""
    counts = decision.inputs.get("by_class") or {} if decision.kind == "refusals" else {}
    shares = [f"{counts[key]} of them {key.partition('/')[2] or 'without a class'}" for key in keys if key in counts]
    return "; ".join([sentence(decision), *shares])


def leads(decision: Decision) -> list[tuple[str, str]]:
    """Links from a decision to what it was about: label and URL."""
    then = f"{reverse('scaling')}?{urlencode({'at': _second(decision.at)})}"
    if decision.kind == "refusals":
        return _refused(decision)
    if decision.subject_type == "scaling_policy":
        return [*_links_to_instances(decision), ("Scaling at this time", then)]
    if decision.subject_type == "instance":
        return [("View instance", reverse("instance", args=[decision.subject])), ("Scaling at this time", then)]
    return []


def _links_to_instances(decision: Decision) -> list[tuple[str, str]]:
    names = named_instances(decision)[:INSTANCES]
    return [(f"Instance {name}", reverse("instance", args=[name])) for name in names]


def named_instances(decision: Decision) -> list[str]:
    """The instances that a scaler's decision started, woke, stopped or names."""
    outcome, one = decision.outcome, decision.inputs.get("instance")
    lists = (outcome.get(name) or [] for name in ("started", "asleep", "stopped"))
    switched = (outcome.get("switched") or {}).get("instance")
    names = dict.fromkeys([*([one] if one else []), *(name for each in lists for name in each), switched or ""])
    return [str(name) for name in names if name]


def _refused(decision: Decision) -> list[tuple[str, str]]:
    """Links to the requests of a batch of refusals, by class. They arrived before it, some of them long before."""
    found = []
    for key in list(decision.inputs.get("by_class") or {})[:CLASSES]:
        tenant, _, slo_class = key.partition("/")
        asked = {
            "tenant": tenant,
            "slo_class": slo_class or NO_CLASS,
            "attained": "no",
            "until": _second(decision.at + SECOND),
        }
        label = f"Misses of {class_name(slo_class)} · {tenant} up to then"
        found.append((label, f"{reverse('requests')}?{urlencode(asked)}"))
    return found


def _second(at: datetime) -> str:
    """In the format of time fields. Bounds are a minute away, so dropping fractions of a second loses nothing."""
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")
