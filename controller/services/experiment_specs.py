"""From what was asked to what the simulator runs.

A spec is the simulator's JSON (`controller/simulator/README.md`) and a little more:

- `instances` may be `{"fleet": "today", "model": NAME, "change": -1}`; profiles are names of shipped ones or objects;
- an entry of `policies` may have `instances` of its own, so that fleets are compared like policies;
- `workload` may be `{"kind": "window", "since", "until", "model", "tenant", "slo_class"}`: recorded traffic;
- `path` of a trace is the slug of a registered one.

`resolved` is done once, when somebody asks: fleet and profiles become figures, so that a run next week gives the same.
`read` makes the simulator's objects of a resolved spec, in the worker. Errors are ConfigError with the field's path.
The simulator is imported when it is needed: numpy would cost every process memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from django.utils import timezone
from django.utils.dateparse import parse_datetime

from controller.core.errors import ConfigError
from controller.models import Trace
from controller.models.experiments import label_of
from controller.selectors import traffic
from controller.selectors.edits import edit_of_json
from controller.selectors.fleet_model import MOST_INSTANCES, default_model, fleet_today, size_of
from controller.services import traces

if TYPE_CHECKING:
    from controller.simulator.demand import Demand
    from controller.simulator.experiment import Experiment as Simulated
    from controller.simulator.workloads import Row

VARIANTS_MAX = 8  # the page offers four, the API a few more
RATES_MAX = 10
SEEDS_MAX = 10
RUNS_MAX = 100
REQUESTS_MAX = 100_000  # of one run
REQUESTS_TOTAL_MAX = 500_000
PREFIXES_SEEN = 200  # rows that tell the size of a trace's blocks
BLOCK_TOKENS = 16  # of an engine that does not say
BLOCK_SIZES = (16, 32, 64, 128, 256, 512, 1024)
WINDOW_MAX = timedelta(days=7)

ReadProfile = Callable[[str], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Replay:
    """Recorded requests as a workload of the simulator: their own times, or stretched to a rate."""

    requests: tuple[Demand, ...]
    estimated: int = 0  # of whose answers the length is not on record

    def newest(self, count: int) -> Replay:
        """The last ones, from the first of them on."""
        kept = self.requests[-count:]
        start = kept[0].at if kept else 0.0
        return Replay(tuple(replace(each, at=each.at - start) for each in kept), self.estimated)

    def demands(self, rate: float | None, seed: int) -> list[Demand]:
        """The same for every seed: nothing is drawn."""
        requests = self.requests
        if rate is None or len(requests) < 2 or requests[-1].at <= 0:
            return list(requests)
        factor = (len(requests) - 1) / requests[-1].at / rate
        return [replace(each, at=each.at * factor) for each in requests]


# ---- once, when it is asked -----------------------------------------------------------------------------------------


def resolved(raw: Any, read_profile: ReadProfile) -> tuple[dict[str, Any], list[str]]:
    """The spec with figures in place of names, and notes on what was chosen. Everything is checked as a run would."""
    if not isinstance(raw, Mapping):
        raise ConfigError("an experiment must be an object", field="spec")
    spec = {**raw, "seeds": list(raw.get("seeds") or [1])} if _is_list(raw.get("seeds")) else dict(raw)
    notes: list[str] = []
    if "instances" in spec:
        spec["instances"] = _instances(spec["instances"], "instances", read_profile)
    policies = spec.get("policies", ["slackline"])
    if not _is_list(policies) or not 1 <= len(policies) <= VARIANTS_MAX:
        raise ConfigError(f"policies must be a list of 1 to {VARIANTS_MAX}", field="policies")
    spec["policies"] = [_policy(each, f"policies[{i}]", read_profile) for i, each in enumerate(policies)]
    if "instances" not in spec:  # every policy may have brought its own
        own = [each["instances"] for each in spec["policies"] if isinstance(each, Mapping) and "instances" in each]
        if len(own) < len(spec["policies"]):
            raise ConfigError("instances is missing", field="instances")
        spec["instances"] = own[0]
    labels = [label_of(each) for each in spec["policies"]]
    if len(set(labels)) != len(labels):
        raise ConfigError("two policies have the same label", field="policies")
    workload = spec.get("workload")
    if isinstance(workload, Mapping) and workload.get("kind") == "window":
        spec["workload"], notes = _window(workload)
    bounds(spec)
    read(spec, dry=True)
    return spec, notes


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _instances(raw: Any, field: str, read_profile: ReadProfile) -> Any:
    if isinstance(raw, Mapping) and "fleet" in raw:
        unknown = sorted(set(raw) - {"fleet", "model", "change"})
        if unknown or raw["fleet"] != "today":
            wrong = unknown[0] if unknown else "fleet"
            raise ConfigError(f"{field}: use fleet 'today', model and change", field=f"{field}.{wrong}")
        model, change = raw.get("model") or default_model(), raw.get("change", 0)
        if not isinstance(model, str):
            raise ConfigError("there is no model; name one", field=f"{field}.model")
        if isinstance(change, bool) or not isinstance(change, int):
            raise ConfigError("change must be a whole number of instances", field=f"{field}.change")
        return fleet_today(model, change, field)
    groups = raw if isinstance(raw, list) else [raw]
    return [_with_figures(group, f"{field}[{index}]", read_profile) for index, group in enumerate(groups)]


def _with_figures(group: Any, field: str, read_profile: ReadProfile) -> Any:
    """Names of profiles as the profiles themselves. What is no object is left for the simulator to refuse."""
    if not isinstance(group, Mapping):
        return group
    found = dict(group)
    for name in ("profile", "believed"):
        if isinstance(found.get(name), str):
            try:
                found[name] = dict(read_profile(found[name]))
            except ConfigError as error:
                raise ConfigError(str(error), field=f"{field}.{name}") from None
    return found


def _policy(raw: Any, field: str, read_profile: ReadProfile) -> Any:
    if isinstance(raw, Mapping) and "retarget" in raw:  # what previews say of themselves
        raise ConfigError(f"unknown field '{field}.retarget'", field=f"{field}.retarget")
    if not isinstance(raw, Mapping) or "instances" not in raw:
        return raw
    return {**raw, "instances": _instances(raw["instances"], f"{field}.instances", read_profile)}


def _window(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Times made absolute, and the stretch that is replayed where the window holds more than a run may."""
    unknown = sorted(set(raw) - {"kind", "since", "until", "model", "tenant", "slo_class"})
    if unknown:
        raise ConfigError(f"a window has no {unknown[0]!r}", field=f"workload.{unknown[0]}")
    since, until = (_time(raw, name) for name in ("since", "until"))
    if not since < until:
        raise ConfigError("until must be after since", field="workload.until")
    if until - since > WINDOW_MAX:
        raise ConfigError(f"a window spans at most {WINDOW_MAX.days} days", field="workload.since")
    model = raw.get("model") or traffic.busiest_model(since, until) or default_model()
    if not isinstance(model, str):
        raise ConfigError("no request is on record, and no model to look for", field="workload.model")
    window = traffic.Window(since, until, model, raw.get("tenant") or None, raw.get("slo_class"))
    stretch = traffic.busiest(window)
    if not stretch.of:
        raise ConfigError(
            f"no request for {model} is on record from {since:%Y-%m-%d %H:%M} to {until:%Y-%m-%d %H:%M} UTC",
            field="workload.since",
        )
    notes = []
    if stretch.cut:
        notes.append(
            f"The window holds {stretch.of:,} requests. Replayed is its busiest stretch: {stretch.requests:,} "
            f"requests, {stretch.since:%Y-%m-%d %H:%M} to {stretch.until:%Y-%m-%d %H:%M} UTC."
        )
    kept = {name: raw[name] for name in ("tenant", "slo_class") if raw.get(name) is not None}
    times = {"since": stretch.since.isoformat(), "until": stretch.until.isoformat()}
    return {"kind": "window", **times, "model": model, "requests": stretch.requests, **kept}, notes


def _time(raw: Mapping[str, Any], name: str) -> datetime:
    try:
        value = parse_datetime(str(raw.get(name, "")))
    except ValueError:
        value = None
    if value is None:
        raise ConfigError(f"{name} must be an ISO 8601 time", field=f"workload.{name}")
    return value if timezone.is_aware(value) else timezone.make_aware(value)


# ---- bounds ------------------------------------------------------------


def bounds(spec: Mapping[str, Any]) -> None:
    """Sizes that would take too long or too much memory, before anything is built."""
    seeds, rates = spec.get("seeds", [1]), spec.get("rates", [])
    for name, values, most in (("seeds", seeds, SEEDS_MAX), ("rates", rates, RATES_MAX)):
        if _is_list(values) and len(values) > most:
            raise ConfigError(f"at most {most} {name}", field=name)
    for place, policy in enumerate([spec, *spec["policies"]]):
        own = policy.get("instances") if isinstance(policy, Mapping) else None
        if own is not None and _is_count(own) and size_of(own) > MOST_INSTANCES:
            name = "instances" if not place else f"policies[{place - 1}].instances"
            raise ConfigError(f"at most {MOST_INSTANCES} instances", field=name)
    runs = run_count(spec)
    if runs > RUNS_MAX:
        raise ConfigError(f"{runs} runs (policies x rates x seeds); at most {RUNS_MAX}", field="policies")
    expected = requests_expected(spec)
    if expected is not None and expected > REQUESTS_MAX:
        raise ConfigError(f"about {expected:,} requests a run; at most {REQUESTS_MAX:,}", field="workload")
    if expected is not None and expected * runs > REQUESTS_TOTAL_MAX:
        raise ConfigError(
            f"about {expected * runs:,} requests over {runs} runs; at most {REQUESTS_TOTAL_MAX:,}", field="workload"
        )


def _is_count(instances: Any) -> bool:
    groups = instances if isinstance(instances, list) else [instances]
    return all(isinstance(each.get("count", 1), int) for each in groups if isinstance(each, Mapping))


def run_count(spec: Mapping[str, Any]) -> int:
    """Policies x rates x seeds."""
    rates = spec.get("rates") or (spec.get("knee") or {}).get("times") or [None]
    return len(spec["policies"]) * (len(rates) if _is_list(rates) else 1) * len(spec.get("seeds") or [1])


def requests_expected(spec: Mapping[str, Any]) -> int | None:
    """Of the largest run; None where only the simulator can say what is wrong with it."""
    workload = spec.get("workload")
    if not isinstance(workload, Mapping):
        return None
    kind = workload.get("kind")
    if kind == "window":
        return int(workload["requests"])
    if kind == "trace":
        count = workload.get("count") or _trace(workload.get("path")).requests
        return count if isinstance(count, int) else None
    return _of_tasks(workload, spec.get("rates"))


def _of_tasks(workload: Mapping[str, Any], rates: Any) -> int | None:
    tasks = workload.get("tasks")
    number = len(tasks) if isinstance(tasks, list) else 4
    per_task, duration = workload.get("per_task"), workload.get("duration_s")
    if isinstance(per_task, int):
        return per_task * number
    asked = [*(rates if _is_list(rates) else []), workload.get("rate")]
    known = [rate for rate in asked if isinstance(rate, int | float)]
    return round(duration * max(known)) if isinstance(duration, int | float) and known else None


# ---- in the worker ------------------------------------------------------------


def read(spec: Mapping[str, Any], dry: bool = False) -> list[Simulated]:
    """One experiment of the simulator for each entry of `policies`, each with one contender.

    `dry`: everything is checked, but traffic and traces are not fetched.
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
        if window is not None:  # the simulator knows no database: it gets the requests below
            raw["workload"] = {"kind": "mix", "mix": "2-task", "per_task": 1, "rate": 1.0}
        try:
            each = parse_experiment(raw, _no_profile, _first_row if dry else partial(_trace_rows, instances))
        except ConfigError as error:
            own = isinstance(policy, Mapping) and "instances" in policy
            raise ConfigError(_moved(str(error), index, own), field=_moved(error.field or "", index, own)) from None
        except (TypeError, ValueError, OverflowError) as error:  # a value no check of the simulator foresaw
            raise ConfigError(f"this cannot be simulated: {error}", field=f"policies[{index}]") from error
        if window is not None and not dry:
            longest = min(instance.max_model_len for instance in each.settings.instances)
            recorded = recorded or _recorded(window)
            each = replace(each, workload=_replay(recorded, longest, policy))
        found.append(each)
    return found


def _own(policy: Any, common: Any) -> tuple[Any, Any]:
    if not isinstance(policy, Mapping):
        return policy, common
    plain = {name: value for name, value in policy.items() if name not in ("instances", "retarget")}
    return plain, policy.get("instances", common)


def _moved(text: str, index: int, own_instances: bool) -> str:
    """Each policy is read as the only one; its errors name its place in the list, and its own instances."""
    moved = text.replace("policies[0]", f"policies[{index}]")
    return re.sub(r"^instances", f"policies[{index}].instances", moved) if own_instances else moved


def _no_profile(name: str) -> Mapping[str, Any]:
    raise ConfigError(f"unknown profile {name!r}", field="instances.profile")


def _trace(slug: Any) -> Trace:
    row = Trace.objects.filter(slug=slug).defer("content").first() if isinstance(slug, str) else None
    if row is None:
        raise ConfigError(f"there is no trace {str(slug)[:80]!r}; register it first", field="workload.path")
    return row


def _trace_rows(instances: Any, slug: str) -> list[Row]:
    """Prefix ids stay where they name blocks of the engines' size; of another size they would say something wrong."""
    from controller.simulator.workloads import parse_row

    rows = [parse_row(raw, number) for number, raw in enumerate(traces.rows_of(_trace(slug)), 1)]
    return [row._replace(prefix=()) for row in rows] if _foreign_blocks(rows, instances) else rows


def _foreign_blocks(rows: Sequence[Row], instances: Any) -> int | None:
    """Tokens a prefix block of the trace where engines have another size, else None.

    A trace does not say; it is the power of two that fits the number of ids of most prompts.
    """
    seen = [row for row in rows if row.prefix][:PREFIXES_SEEN]
    if not seen:
        return None
    fitting = [sum(-(-row.prompt_tokens // size) == len(row.prefix) for row in seen) for size in BLOCK_SIZES]
    block = BLOCK_SIZES[fitting.index(max(fitting))]
    groups = instances if isinstance(instances, list) else [instances]
    return block if any(group.get("block_size", BLOCK_TOKENS) != block for group in groups) else None


def prefix_note(spec: Mapping[str, Any]) -> str:
    """Says it where a trace's prefix ids are left out."""
    from controller.simulator.workloads import parse_row

    workload = spec["workload"]
    if workload.get("kind") != "trace":
        return ""
    first = islice(traces.rows_of(_trace(workload["path"])), PREFIXES_SEEN)
    block = _foreign_blocks([parse_row(raw, number) for number, raw in enumerate(first, 1)], spec["instances"])
    return (
        f"Prefixes are not shared: the trace's blocks have {block} tokens, the engines' another size." if block else ""
    )


def _first_row(slug: str) -> list[Row]:
    """As many rows as the trace has, all alike: counts are checked without unpacking it."""
    from controller.simulator.workloads import parse_row

    row = parse_row({"arrival_s": "0", "input_tokens": "1", "output_tokens": "1"}, 1)
    return [row] * _trace(slug).requests


def _recorded(window: Mapping[str, Any]) -> list[traffic.Arrival]:
    asked = traffic.Window(
        _time(window, "since"), _time(window, "until"), window["model"], window.get("tenant"), window.get("slo_class")
    )
    newest = window.get("newest")
    found = traffic.arrivals(
        asked, limit=newest or traffic.REQUESTS_MAX, newest=bool(newest), sources=bool(window.get("sources"))
    )
    if not found:
        raise ConfigError("the window's records are gone", field="workload.since")
    return found


def _replay(recorded: Sequence[traffic.Arrival], longest: int, policy: Any) -> Replay:
    """`longest`: tokens an engine takes. A preview's policy says in `retarget` which edit it stands for."""
    from controller.simulator.demand import Demand

    retarget = policy.get("retarget") if isinstance(policy, Mapping) else None
    edit = edit_of_json(retarget) if retarget else None
    demands = []
    for number, each in enumerate(recorded):
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
                workflow=each.workflow,
            )
        )
    return Replay(tuple(demands), sum(each.estimated for each in recorded))
