"""Resolves the spec of an experiment: from what a person configured to what the simulator runs.

A spec is the simulator's JSON (`controller/simulator/README.md`) with these additions:

- `instances` may be `{"fleet": "today", "model": NAME, "change": -1}` (with `role`: whose number changes, where
  instances have roles), or `"fleet": "then"` beside recorded traffic: as many at every moment as the scaler counted;
  of roles that it did not count, those of today's that had them then; profiles are names of shipped ones or objects;
- an entry of `policies` may have `instances` of its own, so that fleets are compared like policies;
- `workload` may be `{"kind": "window", "since", "until", "model", "tenant", "slo_class"}`: recorded traffic;
- `path` of a trace is the slug of a registered one.

A spec is resolved once, when the experiment is created: fleet and profiles become figures, so that a run next week
gives the same result. `experiment_reading.read` makes the simulator's objects from it. Errors are ConfigErrors with the
path of the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from django.utils import timezone

from controller.core.errors import ConfigError
from controller.models.experiments import label_of
from controller.selectors.experiments import traffic
from controller.selectors.experiments.fleet_model import (
    MOST_INSTANCES,
    NobodyServes,
    default_model,
    fleet_today,
    size_of,
)
from controller.selectors.experiments.fleet_past import fleet_then
from controller.selectors.experiments.kv_today import NOT_MEASURED, disaggregated, kv_today
from controller.services.experiments.reading import REQUESTS_MAX, read, time_of, trace_named

VARIANTS_MAX = 8  # the page offers four, the API a few more
RATES_MAX = 10
SEEDS_MAX = 10
RUNS_MAX = 100
REQUESTS_TOTAL_MAX = 500_000
WINDOW_MAX = timedelta(days=7)

ReadProfile = Callable[[str], Mapping[str, Any]]


# ---- once, when it is asked -----------------------------------------------------------------------------------------


def resolved(raw: Any, read_profile: ReadProfile) -> tuple[dict[str, Any], list[str]]:
    """The spec with figures in place of names, and notes on what was chosen. All checks of a run are made."""
    if not isinstance(raw, Mapping):
        raise ConfigError("an experiment must be an object", field="spec")
    spec = {**raw, "seeds": list(raw.get("seeds") or [1])} if _is_list(raw.get("seeds")) else dict(raw)
    notes: list[str] = []
    workload, window = spec.get("workload"), None
    if isinstance(workload, Mapping) and workload.get("kind") == "window":
        window, notes = _window(workload)
        spec["workload"] = window
    fleets = _Fleets(read_profile, window)
    if "instances" in spec:
        spec["instances"] = fleets.of(spec["instances"], "instances")
    policies = spec.get("policies", ["slackline"])
    if not _is_list(policies) or not 1 <= len(policies) <= VARIANTS_MAX:
        raise ConfigError(f"policies must be a list of 1 to {VARIANTS_MAX}", field="policies")
    spec["policies"] = [_policy(each, f"policies[{i}]", fleets) for i, each in enumerate(policies)]
    if "instances" not in spec:  # every policy may have its own
        own = [each["instances"] for each in spec["policies"] if isinstance(each, Mapping) and "instances" in each]
        if len(own) < len(spec["policies"]):
            raise ConfigError("instances is missing", field="instances")
        spec["instances"] = own[0]
    labels = [label_of(each) for each in spec["policies"]]
    if len(set(labels)) != len(labels):
        raise ConfigError("two policies have the same label", field="policies")
    notes = [*notes, *fleets.notes]
    if fleets.notes and (wrong := next((name for name in ("rates", "knee") if spec.get(name)), None)):
        raise ConfigError(
            "must be empty with the fleet 'then': its instances follow the original times of the traffic", field=wrong
        )
    model = next((asked for asked in map(_model_today, [raw, *policies]) if asked is not None), None)
    if model is not None:
        notes = [*notes, *with_kv_today(spec, model)]
    bounds(spec)
    read(spec, dry=True)
    return spec, notes


def _model_today(asked: Any) -> str | None:
    """The model whose current fleet the spec refers to, if any."""
    instances = asked.get("instances") if isinstance(asked, Mapping) else None
    if not isinstance(instances, Mapping) or "fleet" not in instances:
        return None
    return str(instances.get("model") or default_model() or "")


def with_kv_today(spec: dict[str, Any], model: str) -> list[str]:
    """If the current fleet is disaggregated, add the measured `settings.links` and KV sizes unless they are given.
    Returns notes on them."""
    fleets = [spec["instances"], *(each["instances"] for each in spec["policies"] if _brings(each))]
    if not any(map(disaggregated, fleets)):
        return []
    settings = spec.get("settings", {})
    if not isinstance(settings, Mapping) or "links" in settings:
        return []
    found = kv_today(model, timezone.now())
    if found is None:
        return [NOT_MEASURED]
    spec["settings"] = {**settings, "links": found.settings}
    for fleet in fleets:
        for group in fleet if isinstance(fleet, list) else [fleet]:
            if isinstance(group, dict):
                group.setdefault("kv_bytes_per_token", found.bytes_per_token)
    return [found.note]


def _brings(policy: Any) -> bool:
    return isinstance(policy, Mapping) and "instances" in policy


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


class _Fleets:
    """Resolves instances to figures. `window`: of the recorded traffic, if any. `notes`: on past fleets."""

    def __init__(self, read_profile: ReadProfile, window: Mapping[str, Any] | None) -> None:
        self._read_profile = read_profile
        self._window = window
        self.notes: list[str] = []

    def of(self, raw: Any, field: str) -> Any:
        if isinstance(raw, Mapping) and "fleet" in raw:
            return self._named(raw, field)
        groups = raw if isinstance(raw, list) else [raw]
        return [_with_figures(group, f"{field}[{index}]", self._read_profile) for index, group in enumerate(groups)]

    def _named(self, raw: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
        unknown = sorted(set(raw) - {"fleet", "model", "change", "role"})
        if unknown or raw["fleet"] not in ("today", "then"):
            wrong = unknown[0] if unknown else "fleet"
            raise ConfigError(f"{field}: use fleet 'today' or 'then', model, change and role", field=f"{field}.{wrong}")
        model, change, role = raw.get("model") or default_model(), raw.get("change", 0), raw.get("role")
        if not isinstance(model, str):
            raise ConfigError("no model exists yet; name one", field=f"{field}.model")
        if isinstance(change, bool) or not isinstance(change, int):
            raise ConfigError("change must be a whole number of instances", field=f"{field}.change")
        if role is not None and not isinstance(role, str):
            raise ConfigError("role must be a name", field=f"{field}.role")
        try:
            if raw["fleet"] == "today":
                return fleet_today(model, change, field, role)
            return self._then(model, change, field, role)
        except NobodyServes as error:
            raise ConfigError(f"{error}; choose a shipped profile instead", field=error.field) from error

    def _then(self, model: str, change: int, field: str, role: str | None) -> list[dict[str, Any]]:
        if self._window is None:
            raise ConfigError("the fleet 'then' requires recorded traffic (kind window)", field=f"{field}.fleet")
        since, until = (time_of(self._window, name) for name in ("since", "until"))
        found = fleet_then(model, since, until, change, field, role)
        if found.note not in self.notes:
            self.notes.append(found.note)
        return found.groups


def _with_figures(group: Any, field: str, read_profile: ReadProfile) -> Any:
    """Replace names of profiles by the profiles. Anything that is no object is left for the simulator to reject."""
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


def _policy(raw: Any, field: str, fleets: _Fleets) -> Any:
    if isinstance(raw, Mapping) and "retarget" in raw:  # only previews may set it
        raise ConfigError(f"unknown field '{field}.retarget'", field=f"{field}.retarget")
    if not isinstance(raw, Mapping) or "instances" not in raw:
        return raw
    return {**raw, "instances": fleets.of(raw["instances"], f"{field}.instances")}


def _window(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The window with absolute times, shortened if it holds more requests than a run may have."""
    unknown = sorted(set(raw) - {"kind", "since", "until", "model", "tenant", "slo_class"})
    if unknown:
        raise ConfigError(f"unknown field {unknown[0]!r} in a window", field=f"workload.{unknown[0]}")
    since, until = (time_of(raw, name) for name in ("since", "until"))
    if not since < until:
        raise ConfigError("until must be after since", field="workload.until")
    if until - since > WINDOW_MAX:
        raise ConfigError(f"a window spans at most {WINDOW_MAX.days} days", field="workload.since")
    model = raw.get("model") or traffic.busiest_model(since, until) or default_model()
    if not isinstance(model, str):
        raise ConfigError("no requests are recorded, and no model is named", field="workload.model")
    window = traffic.RecordedWindow(since, until, model, raw.get("tenant") or None, raw.get("slo_class"))
    stretch = traffic.busiest(window)
    if not stretch.of:
        raise _nothing_in(window)
    notes = []
    if stretch.cut:
        notes.append(
            f"The time range has {stretch.of:,} requests. The busiest part is replayed: {stretch.requests:,} "
            f"requests, {stretch.since:%Y-%m-%d %H:%M} to {stretch.until:%Y-%m-%d %H:%M} UTC."
        )
    kept = {name: raw[name] for name in ("tenant", "slo_class") if raw.get(name) is not None}
    times = {"since": stretch.since.isoformat(), "until": stretch.until.isoformat()}
    return {"kind": "window", **times, "model": model, "requests": stretch.requests, **kept}, notes


def _nothing_in(window: traffic.RecordedWindow) -> ConfigError:
    """The error, at the field that excludes all traffic; at the times only if the model had no traffic at all then."""
    asked = {"tenant": window.tenant, "slo_class": window.slo_class}
    given = {name: value for name, value in asked.items() if value is not None}
    everyone = replace(window, tenant=None, slo_class=None)
    when = f"for {window.model} is recorded from {window.since:%Y-%m-%d %H:%M} to {window.until:%Y-%m-%d %H:%M} UTC"
    if not given or not traffic.busiest(everyone).of:
        return ConfigError(f"no request {when}", field="workload.since")
    only = {
        "tenant": replace(everyone, tenant=window.tenant),
        "slo_class": replace(everyone, slo_class=window.slo_class),
    }
    alone = [name for name in given if not traffic.busiest(only[name]).of]
    named = alone[:1] or list(given)  # each filter alone matches traffic; only together they match none
    words = " and ".join(_filter_words(name, given[name]) for name in named)
    return ConfigError(f"no request {words} {when}", field=f"workload.{named[-1]}")


def _filter_words(name: str, value: str) -> str:
    if name == "tenant":
        return f"of tenant {value}"
    return f"of class {value}" if value else "without a class"


# ---- bounds ------------------------------------------------------------


def bounds(spec: Mapping[str, Any]) -> None:
    """Reject sizes that would take too long or too much memory, before anything is built."""
    seeds, rates = spec.get("seeds", [1]), spec.get("rates", [])
    for name, values, most in (("seeds", seeds, SEEDS_MAX), ("rates", rates, RATES_MAX)):
        if _is_list(values) and len(values) > most:
            raise ConfigError(f"must have at most {most} {name}", field=name)
    for place, policy in enumerate([spec, *spec["policies"]]):
        own = policy.get("instances") if isinstance(policy, Mapping) else None
        if own is not None and _is_count(own) and size_of(own) > MOST_INSTANCES:
            name = "instances" if not place else f"policies[{place - 1}].instances"
            raise ConfigError(f"must have at most {MOST_INSTANCES} instances", field=name)
    runs = run_count(spec)
    if runs > RUNS_MAX:
        raise ConfigError(f"{runs} runs (policies x rates x seeds) exceed the limit of {RUNS_MAX}", field="policies")
    expected = requests_expected(spec)
    if expected is not None and expected > REQUESTS_MAX:
        raise ConfigError(f"about {expected:,} requests per run exceed the limit of {REQUESTS_MAX:,}", field="workload")
    if expected is not None and expected * runs > REQUESTS_TOTAL_MAX:
        raise ConfigError(
            f"about {expected * runs:,} requests over {runs} runs exceed the limit of {REQUESTS_TOTAL_MAX:,}",
            field="workload",
        )


def _is_count(instances: Any) -> bool:
    groups = instances if isinstance(instances, list) else [instances]
    return all(isinstance(each.get("count", 1), int) for each in groups if isinstance(each, Mapping))


def run_count(spec: Mapping[str, Any]) -> int:
    """Policies x rates x seeds."""
    rates = spec.get("rates") or (spec.get("knee") or {}).get("times") or [None]
    return len(spec["policies"]) * (len(rates) if _is_list(rates) else 1) * len(spec.get("seeds") or [1])


def requests_expected(spec: Mapping[str, Any]) -> int | None:
    """Requests of the largest run; None if the workload is invalid, which the simulator reports."""
    workload = spec.get("workload")
    if not isinstance(workload, Mapping):
        return None
    kind = workload.get("kind")
    if kind == "window":
        return int(workload["requests"])
    if kind == "trace":
        count = workload.get("count") or trace_named(workload.get("path")).requests
        return count if isinstance(count, int) else None
    if kind == "programs":
        return _of_programs(workload)
    return _of_tasks(workload, spec.get("rates"))


def _of_programs(workload: Mapping[str, Any]) -> int | None:
    """Calls of a workload of programs; the simulator reports what is invalid."""
    from controller.simulator.workloads.concord_mix import calls_each

    count, shares = workload.get("programs"), workload.get("shares", [1, 1, 1])
    if not isinstance(count, int) or not _is_list(shares) or not all(isinstance(each, int | float) for each in shares):
        return None
    return round(count * calls_each(shares)) if len(shares) == 3 and sum(shares) > 0 else None


def _of_tasks(workload: Mapping[str, Any], rates: Any) -> int | None:
    tasks = workload.get("tasks")
    number = len(tasks) if isinstance(tasks, list) else 4
    per_task, duration = workload.get("per_task"), workload.get("duration_s")
    if isinstance(per_task, int):
        return per_task * number
    asked = [*(rates if _is_list(rates) else []), workload.get("rate")]
    known = [rate for rate in asked if isinstance(rate, int | float)]
    return round(duration * max(known)) if isinstance(duration, int | float) and known else None
