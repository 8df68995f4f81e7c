"""Turns a resolved spec into the simulator's objects, in the worker. Recorded traffic and traces are read here.

Errors are ConfigErrors with the path of the field. The simulator is imported when it is needed, since numpy would cost
every process memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from django.utils import timezone
from django.utils.dateparse import parse_datetime

from controller.core.errors import ConfigError
from controller.models import Trace
from controller.selectors import catalogue
from controller.selectors.experiments import traffic
from controller.selectors.experiments.edits import edit_of_json
from controller.services.experiments import traces

if TYPE_CHECKING:
    from controller.simulator.experiment import ExperimentPlan as Simulated
    from controller.simulator.workloads.demand import Demand
    from controller.simulator.workloads.sources import TraceRow, Workload

REQUESTS_MAX = 100_000  # of one run
PREFIXES_SEEN = 200  # rows from which the block size of a trace is inferred
BLOCK_TOKENS = 16  # of an engine that reports none
BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024)


class Origin(NamedTuple):
    """What the record of a request has beyond what a run uses. `estimated`: the length of its answer is not on record;
    `attained`: None if its client gave up."""

    estimated: bool
    attained: bool | None


@dataclass(frozen=True, slots=True)
class RecordedReplay:
    """Recorded requests as a workload of the simulator, at their own times or stretched to a rate.

    `began`: arrival of the first request, epoch seconds. `origins`: one for each request.
    """

    requests: tuple[Demand, ...]
    origins: tuple[Origin, ...] = ()
    began: float = 0.0

    @property
    def estimated(self) -> int:
        """The number of answers whose length is not on record."""
        return sum(each.estimated for each in self.origins)

    def newest(self, count: int) -> RecordedReplay:
        """The last requests alone, with times that begin at the first of them."""
        if count >= len(self.requests):
            return self
        kept = self.requests[-count:]
        start = kept[0].at
        shifted = tuple(replace(each, at=each.at - start) for each in kept)
        return RecordedReplay(shifted, self.origins[-count:], self.began + start)

    def demands(self, rate: float | None, seed: int) -> list[Demand]:
        """The same for every seed, since nothing is drawn at random."""
        requests = self.requests
        if rate is None or len(requests) < 2 or requests[-1].at <= 0:
            return list(requests)
        factor = (len(requests) - 1) / requests[-1].at / rate
        return [replace(each, at=each.at * factor) for each in requests]


@dataclass(frozen=True, slots=True)
class BoundedWorkload:
    """A workload of fixed duration with a bound on its requests. The search for a knee doubles the rate, and nothing
    else would stop it."""

    workload: Workload
    rate: float | None
    duration_s: float

    def demands(self, rate: float | None, seed: int) -> list[Demand]:
        expected = (rate or self.rate or 0.0) * self.duration_s
        if expected > REQUESTS_MAX:
            raise ConfigError(
                f"about {expected:,.0f} requests per run exceed the limit of {REQUESTS_MAX:,}", field="workload"
            )
        return self.workload.demands(rate, seed)


def read(spec: Mapping[str, Any], dry: bool = False) -> list[Simulated]:
    """One experiment of the simulator for each entry of `policies`, with one contender each.

    `dry`: check everything without reading traffic and traces.
    """
    from controller.simulator.experiment import parse_experiment

    recorded: list[traffic.Arrival] = []
    found = []
    for index, policy in enumerate(spec["policies"]):
        plain, instances = _own(policy, spec["instances"])
        raw = {**{name: value for name, value in spec.items() if name != "notes"}, "policies": [plain]}
        raw["instances"] = instances
        workload = raw.get("workload")
        window = workload if isinstance(workload, Mapping) and workload.get("kind") == "window" else None
        if window is not None:  # the simulator reads no database; the requests are added below
            raw["workload"] = {"kind": "mix", "mix": "2-task", "per_task": 1, "rate": 1.0}
        try:
            each = parse_experiment(raw, _no_profile, _first_row if dry else partial(_trace_rows, instances))
        except ConfigError as error:
            own = isinstance(policy, Mapping) and "instances" in policy
            raise ConfigError(_moved(str(error), index, own), field=_moved(error.field or "", index, own)) from None
        except (TypeError, ValueError, OverflowError) as error:  # a value that none of the simulator's checks covers
            raise ConfigError(f"this cannot be simulated: {error}", field=f"policies[{index}]") from error
        if window is not None and not dry:
            longest = min(instance.max_model_len for instance in each.settings.instances)
            recorded = recorded or _recorded(window)
            each = _replaying(each, _replay(recorded, longest, policy), time_of(window, "since"))
        elif isinstance(workload, Mapping) and isinstance(workload.get("duration_s"), int | float):
            each = replace(each, workload=BoundedWorkload(each.workload, workload.get("rate"), workload["duration_s"]))
        found.append(each)
    return found


def _own(policy: Any, common: Any) -> tuple[Any, Any]:
    if not isinstance(policy, Mapping):
        return policy, common
    plain = {name: value for name, value in policy.items() if name not in ("instances", "retarget")}
    return plain, policy.get("instances", common)


def _moved(text: str, index: int, own_instances: bool) -> str:
    """The field path for the user. Each policy is read as if it were the only one; the path names its place in the
    list, or its own instances."""
    moved = text.replace("policies[0]", f"policies[{index}]")
    return re.sub(r"^instances", f"policies[{index}].instances", moved) if own_instances else moved


def _no_profile(name: str) -> Mapping[str, Any]:
    raise ConfigError(f"unknown profile {name!r}", field="instances.profile")


def trace_named(slug: Any) -> Trace:
    """The trace without its content. Raises ConfigError if no such trace is registered."""
    row = Trace.objects.filter(slug=slug).defer("content").first() if isinstance(slug, str) else None
    if row is None:
        raise ConfigError(f"no trace {str(slug)[:80]!r}; upload it first", field="workload.path")
    return row


def _trace_rows(instances: Any, slug: str) -> list[TraceRow]:
    """The rows of the trace. Prefix ids are kept only if they name blocks of the engines' size; others would be
    wrong."""
    from controller.simulator.workloads.sources import parse_row

    rows = [parse_row(raw, number) for number, raw in enumerate(traces.rows_of(trace_named(slug)), 1)]
    return [row._replace(prefix=()) for row in rows] if _foreign_blocks(rows, instances) else rows


def _foreign_blocks(rows: Sequence[TraceRow], instances: Any) -> int | None:
    """Tokens in a prefix block of the trace, if engines have another block size; else None.

    A trace does not name its block size. It is the power of two that fits the number of ids of most prompts.
    """
    seen = [row for row in rows if row.prefix][:PREFIXES_SEEN]
    if not seen:
        return None
    fitting = [sum(-(-row.prompt_tokens // size) == len(row.prefix) for row in seen) for size in BLOCK_SIZES]
    block = BLOCK_SIZES[fitting.index(max(fitting))]
    groups = instances if isinstance(instances, list) else [instances]
    return block if any(group.get("block_size", BLOCK_TOKENS) != block for group in groups) else None


def prefix_note(spec: Mapping[str, Any]) -> str:
    """A note if the prefix ids of a trace are left out."""
    from controller.simulator.workloads.sources import parse_row

    workload = spec["workload"]
    if workload.get("kind") != "trace":
        return ""
    first = islice(traces.rows_of(trace_named(workload["path"])), PREFIXES_SEEN)
    block = _foreign_blocks([parse_row(raw, number) for number, raw in enumerate(first, 1)], spec["instances"])
    return (
        f"Prefixes are not shared: the trace's blocks have {block} tokens, the engines' another size." if block else ""
    )


def _first_row(slug: str) -> list[TraceRow]:
    """As many rows as the trace has, all equal to its first, so that counts are checked without decompressing it."""
    from controller.simulator.workloads.sources import parse_row

    row = parse_row({"arrival_s": "0", "input_tokens": "1", "output_tokens": "1"}, 1)
    return [row] * trace_named(slug).requests


def _recorded(window: Mapping[str, Any]) -> list[traffic.Arrival]:
    asked = traffic.RecordedWindow(
        time_of(window, "since"),
        time_of(window, "until"),
        window["model"],
        window.get("tenant"),
        window.get("slo_class"),
    )
    newest = window.get("newest")
    found = traffic.arrivals(
        asked, limit=newest or traffic.REQUESTS_MAX, newest=bool(newest), sources=bool(window.get("sources"))
    )
    if not found:
        raise ConfigError("the records of this time range have been deleted", field="workload.since")
    return found


def _replaying(one: Simulated, replay: RecordedReplay, since: datetime) -> Simulated:
    """Move the instances' times from the start of the window to the first request, with which the run begins."""
    from controller.simulator.fleet.presence import from_second

    settings = from_second(one.settings, max(0.0, replay.began - since.timestamp()))
    return replace(one, workload=replay, settings=settings)


def _replay(recorded: Sequence[traffic.Arrival], longest: int, policy: Any) -> RecordedReplay:
    """The recorded requests. `longest`: tokens that an engine accepts. A preview names its edit in `retarget`."""
    from controller.simulator.workloads.demand import Demand

    retarget = policy.get("retarget") if isinstance(policy, Mapping) else None
    edit = edit_of_json(retarget) if retarget else None
    values = catalogue.values()
    demands = []
    for number, each in enumerate(recorded):
        value = values.get((each.tenant, each.slo_class)) or values.get((None, each.slo_class)) or 1.0
        output = max(1, min(each.output_tokens, longest - 2))
        demands.append(
            Demand(
                id=f"w{number}",
                at=each.at,
                prompt_tokens=max(1, min(each.prompt_tokens, longest - 1 - output)),
                output_tokens=output,
                targets=edit.targets(each) if edit is not None else each.targets,
                slo_class=each.slo_class,
                tenant=each.tenant,
                value=edit.worth(each, value) if edit is not None else value,
                workflow=each.workflow,
                may_defer=edit.defers(each) if edit is not None else each.may_defer,
            )
        )
    origins = tuple(Origin(each.estimated, each.attained) for each in recorded)
    return RecordedReplay(tuple(demands), origins, recorded[0].arrived_at.timestamp())


def time_of(raw: Mapping[str, Any], name: str) -> datetime:
    try:
        value = parse_datetime(str(raw.get(name, "")))
    except ValueError:
        value = None
    if value is None:
        raise ConfigError(f"{name} must be an ISO 8601 time", field=f"workload.{name}")
    return value if timezone.is_aware(value) else timezone.make_aware(value)
