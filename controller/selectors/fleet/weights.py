"""Which engines hold a model's weights, and over which links they can be reached: the input of the source plan. Also
the first token of an instance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta

from django.db.models import DateTimeField, DurationField, ExpressionWrapper, F, Min, Q, Value
from django.db.models.functions import Coalesce

from controller.core.kv_links import LinkState
from controller.models import Action, Instance, InstanceLink, Link, RequestRecord
from controller.models.fleet import Weights
from controller.scale.provisioning import Hosts
from controller.scale.weight_sources import Holder, Path, SourcePlan, plan_sources
from controller.selectors.records.requests import served_by

LONGEST_WAIT = timedelta(minutes=15)  # that a request can spend in the queue
# Requests whose client got something, and after how many seconds; an answer in one piece has no separate first token.
ANSWERED = Q(ttft_s__isnull=False) | Q(outcome="ok", e2e_s__isnull=False)
FIRST_AFTER = ExpressionWrapper(Coalesce("ttft_s", "e2e_s") * Value(timedelta(seconds=1)), DurationField())
# When a client got the first token of a request, or its answer in one piece.
FIRST_AT = ExpressionWrapper(F("arrived_at") + FIRST_AFTER, DateTimeField())
THIS_MACHINE = "(this machine)"  # the host of process instances without one, which all run on the supervisor's machine


def weight_plan(row: Instance, utilisation: Mapping[str, float], *, host_copy: bool = False) -> SourcePlan:
    """Where `row` can load its weights from now. `utilisation`: by instance, as gateways publish it. Four queries.

    A sleeper at level 1 has its own copy in host memory.
    """
    sending = _sending()
    down = set(
        InstanceLink.objects.filter(target=row.pk, closed_at__isnull=True, state=LinkState.DOWN.value).values_list(
            "source", flat=True
        )
    )
    holders = [
        Holder(
            each.pk,
            each.url,
            _host(each),
            utilisation.get(each.pk, 0.0),
            sending[each.url.rstrip("/")],
            each.pk not in down,
            each.ranks,
        )
        for each in Instance.objects.live()
        .select_related("host")
        .filter(model=row.model, backend=row.backend, weights=Weights.PRESENT)
        .filter(observed_state__in=[Instance.Observed.READY, Instance.Observed.DRAINING])
        .exclude(url="")
    ]
    paths = [
        Path(link.source.name, link.target.name, link.bandwidth_bytes_s, link.state == Link.State.UP)
        for link in Link.objects.select_related("source", "target").filter(target=row.host)
    ] if row.host else []  # fmt: skip
    kept, host = row.sleep_level == 1, _host(row)
    return plan_sources(row.pk, holders, paths, target_host=host, host_copy=host_copy, copy_first=kept, ranks=row.ranks)


def first_token_at(row: Instance, since: datetime) -> datetime | None:
    """When a client first got a token since then, or an answer in one piece, of a request that the instance decoded or
    prefilled; None: no such request has ended."""
    began = since - LONGEST_WAIT  # bounds the day partitions that are read
    rows = RequestRecord.objects.filter(ANSWERED, served_by(row.pk), arrived_at__gte=began)
    at: datetime | None = rows.annotate(first=FIRST_AT).filter(first__gte=since).aggregate(at=Min("first"))["at"]
    return at


def _sending() -> Counter[str]:
    """Transfers in progress by the URL of the sending engine: of each target the source that it tries now."""
    loads = Action.objects.filter(kind=Action.Kind.WEIGHTS_LOAD, state=Action.State.RUNNING)
    found: Counter[str] = Counter()
    for told, trying in loads.values_list("params__told", "params__trying"):
        for source in (told or [])[trying or 0 :][:1]:
            found[source.get("url", "").rstrip("/")] += 1
    return found


def _host(row: Instance) -> str:
    if row.host is not None:
        return row.host.name
    return THIS_MACHINE if row.abilities.hosts == Hosts.THIS_MACHINE else ""
