"""An experiment: workload, instances, policies, rates and seeds. Parsed from plain JSON values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from controller.core.errors import ConfigError
from controller.core.snapshot import MappingConfig
from controller.core.types import LatencyCoefficients, Role
from controller.dispatch import POLICY_SETS, Migrator, StageDispatcher, build_dispatcher, build_migrator
from controller.predict.boundaries import shape
from controller.predict.operator_profile import OperatorProfile, read_operator_profile
from controller.scale import ScalingConfig
from controller.simulator.fields import Fields
from controller.simulator.load_times import LOAD_S, load_times
from controller.simulator.machine_speed import MachineSpeed
from controller.simulator.mapping import around
from controller.simulator.network import LINK_POLICIES, SCOPES, LinkFailure, LinkSettings, PortSpeed
from controller.simulator.settings import (
    MODEL_SHAPE,
    ElasticSettings,
    Failure,
    InstanceSettings,
    PruningSettings,
    SimulationSettings,
)
from controller.simulator.workloads.program_workload import ProgramMix, read_foresight
from controller.simulator.workloads.programs import Foresight
from controller.simulator.workloads.sources import ReadTrace, Workload, read_workload

ReadProfile = Callable[[str], Mapping[str, Any]]
COEFFICIENTS = LatencyCoefficients._fields
FROM_PROFILE = {  # instance fields that a profile may set, by their names in profiles; `_est`: estimated
    "kv_tokens": ("kv_capacity_tokens", "kv_capacity_tokens_est"),
    "kv_bytes_per_token": ("kv_bytes_per_token",),
    "tensor_parallel": ("tp",),
}
OF_AN_INSTANCE = ("role", "from_s", "until_s", "sleep_level", "weights_of")  # policies cannot change these
MEASURED = ("latency", "believed", "operators")  # read from profiles, not directly from the file
ENGINE_FIELDS = tuple(sorted(f.name for f in fields(InstanceSettings) if f.name not in MEASURED))


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy set with its settings, under a label of its own.

    `engine` changes fields of every instance for it; `prefill_engine` and `decode_engine` then change those with that
    role. `foresight`: what its engines are told about programs, if not what the workload says. `pruning`: in place of
    that of all contenders.
    """

    label: str
    policy_set: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    prefill_engine: Mapping[str, Any] = field(default_factory=dict)
    decode_engine: Mapping[str, Any] = field(default_factory=dict)
    foresight: Foresight | None = None
    pruning: PruningSettings | None = None

    def build(self) -> StageDispatcher:
        """A new dispatcher for each run, since dispatchers learn."""
        return build_dispatcher(self.policy_set, {key: dict(value) for key, value in self.overrides.items()})

    def build_migrator(self) -> Migrator:
        """A new migrator for each run, for instances with roles."""
        return build_migrator(self.policy_set, self.overrides)

    def settings(self, common: SimulationSettings) -> SimulationSettings:
        """The run's settings for this contender. Raises ConfigError for an invalid engine setting."""
        instances = tuple(self._instance(each) for each in common.instances)
        return replace(common, instances=instances, pruning=self.pruning or common.pruning)

    def _instance(self, common: InstanceSettings) -> InstanceSettings:
        by_role = {Role.PREFILL: self.prefill_engine, Role.DECODE: self.decode_engine}
        return replace(common, **{**self.engine, **by_role.get(Role(common.role), {})})


@dataclass(frozen=True, slots=True)
class Knee:
    """Rates as multiples of the rate at which the attainment of `contender` falls below `level`."""

    contender: Contender
    level: float
    times: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ExperimentPlan:
    name: str
    settings: SimulationSettings
    workload: Workload
    contenders: tuple[Contender, ...]
    seeds: tuple[int, ...]
    rates: tuple[float, ...] = ()
    knee: Knee | None = None
    level: float = 0.9
    warmup_s: float = 0.0


def parse_experiment(raw: Any, read_profile: ReadProfile, read_trace: ReadTrace) -> ExperimentPlan:
    """Parse an experiment.

    Raises ConfigError whose `field` is the path of the invalid value ("instances.max_num_seqs").
    """
    top = Fields(raw, "")
    instances = _instances(top, read_profile)
    settings = _settings(top.object("settings"), instances)
    longest = min(instance.max_model_len for instance in instances)
    workload = read_workload(Fields(top.required("workload"), "workload"), read_trace, longest)
    contenders = tuple(contender(item, f"policies[{i}]") for i, item in enumerate(top.list("policies", ["slackline"])))
    for index, each in enumerate(contenders):
        _check_engine(each, settings, f"policies[{index}].engine")
        if each.foresight is not None and not isinstance(workload, ProgramMix):
            raise ConfigError("foresight is of a workload of programs", field=f"policies[{index}].foresight")
    labels = [each.label for each in contenders]
    if not contenders or len(set(labels)) != len(labels):
        raise ConfigError("policies must be given, each with a label of its own", field="policies")
    experiment = ExperimentPlan(
        name=top.text("name", "experiment"),
        settings=settings,
        workload=workload,
        contenders=contenders,
        seeds=_seeds(top),
        rates=tuple(top.check_number(rate, "rates", 0) for rate in top.list("rates", [])),
        knee=_knee(top.object("knee")) if "knee" in top else None,
        level=top.number("level", 0.9, above=0),
        warmup_s=top.number("warmup_s", 0.0, above=-1e-9),
    )
    top.done()
    return experiment


def contender(raw: Any, where: str = "policies") -> Contender:
    """A name, or an object with name, label, overrides, engine, foresight and pruning.

    Built once here, so that an invalid setting is found early.
    """
    if isinstance(raw, str):
        raw = {"name": raw}
    item = Fields(raw, where)
    name = item.text("name", valid=sorted(POLICY_SETS))
    label = item.text("label", name)
    overrides = item.any("overrides", {})
    if not isinstance(overrides, Mapping) or not all(isinstance(value, Mapping) for value in overrides.values()):
        raise ConfigError(f"{where}.overrides must be settings by part", field=f"{where}.overrides")
    engine, prefill, decode = (_engine(item.object(f"{part}engine")) for part in ("", "prefill_", "decode_"))
    foresight = read_foresight(item.object("foresight")) if "foresight" in item else None
    pruning = _pruning(item.object("pruning")) if "pruning" in item else None
    made = Contender(label, name, overrides, engine, prefill, decode, foresight, pruning)
    item.done()
    try:
        made.build()
    except ConfigError as error:
        raise ConfigError(str(error), field=f"{where}.overrides.{error.field}") from None
    return made


def _engine(item: Fields) -> Mapping[str, Any]:
    changes = {key: item.any(key) for key in ENGINE_FIELDS if key not in OF_AN_INSTANCE}
    item.done()
    return {key: value for key, value in changes.items() if value is not None}


def _check_engine(each: Contender, settings: SimulationSettings, where: str) -> None:
    try:
        each.settings(settings)
    except (ConfigError, TypeError) as error:
        raise ConfigError(str(error), field=f"{where}.{getattr(error, 'field', '') or ''}".rstrip(".")) from None


def _seeds(top: Fields) -> tuple[int, ...]:
    seeds = tuple(top.check_integer(seed, "seeds", 0) for seed in top.list("seeds", [1]))
    if not seeds:
        raise ConfigError("seeds must not be empty", field="seeds")
    return seeds


def _knee(item: Fields) -> Knee:
    found = Knee(
        contender(item.any("policy", "round_robin"), "knee.policy"),
        item.number("level", 0.9, above=0),
        tuple(item.check_number(times, "times", 0) for times in item.list("times", [1.0])),
    )
    item.done()
    return found


def _instances(top: Fields, read_profile: ReadProfile) -> tuple[InstanceSettings, ...]:
    raw = top.required("instances")
    groups = raw if isinstance(raw, list) else [raw]
    made: list[InstanceSettings] = []
    for index, group in enumerate(groups):
        item = Fields(group, f"instances[{index}]" if isinstance(raw, list) else "instances")
        count = item.integer("count", 1)
        made += [_instance(item, read_profile)] * count
    return tuple(made)


def _instance(item: Fields, read_profile: ReadProfile) -> InstanceSettings:
    profile = _profile(item, item.required("profile"), read_profile)
    values: dict[str, Any] = {"latency": _coefficients(profile, item.name("profile"))}
    for known, names in FROM_PROFILE.items():
        found = next((profile[each] for each in names if profile.get(each)), None)
        if found is not None:
            values[known] = int(found)
    if isinstance(profile.get("model"), str):
        values["weights_of"] = profile["model"]
    believed = item.any("believed")
    if believed is not None:
        values["believed"] = _coefficients(_profile(item, believed, read_profile), item.name("believed"))
    for known in ENGINE_FIELDS:
        given = item.any(known)
        if given is not None:
            values[known] = given
    operators = item.any("operators")
    if operators is not None:
        values["operators"] = _operators(item, operators, values.get("model_shape", MODEL_SHAPE), read_profile)
    item.done()
    try:
        return InstanceSettings(**values)
    except (ConfigError, TypeError) as error:
        name = getattr(error, "field", None)
        raise ConfigError(str(error), field=item.name(name) if name else item.where) from None


def _profile(item: Fields, raw: Any, read_profile: ReadProfile) -> Mapping[str, Any]:
    profile = read_profile(raw) if isinstance(raw, str) else raw
    if not isinstance(profile, Mapping):
        raise ConfigError(f"{item.name('profile')} must be a path or an object", field=item.name("profile"))
    return profile


def _operators(item: Fields, raw: Any, shape_name: str, read_profile: ReadProfile) -> OperatorProfile:
    """An object with `rows`, or the path of one (operator_profile.py); `layers` comes from the shape if it has none."""
    where = item.name("operators")
    try:
        layers = shape(shape_name).layers
    except ConfigError as error:
        raise ConfigError(str(error), field=item.name("model_shape")) from None
    try:
        found = read_profile(raw) if isinstance(raw, str) else raw
    except ConfigError as error:  # not a file, or not read
        raise ConfigError(str(error), field=where) from None
    try:
        return read_operator_profile(found, layers)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", field=f"{where}.{error.field}".rstrip(".")) from None


def _coefficients(profile: Mapping[str, Any], where: str) -> LatencyCoefficients:
    """The six names, or `coefficients` with them, or `prefill` and `decode` with a, b, c."""
    flat = profile.get("coefficients", profile)
    if "prefill" in flat and "decode" in flat:
        flat = {f"{part}_{key}": flat[part].get(key) for part in ("prefill", "decode") for key in "abc"}
    wrong = [name for name in COEFFICIENTS if not isinstance(flat.get(name), int | float)]
    if wrong:
        raise ConfigError(f"{where} lacks {wrong[0]}; it needs: {', '.join(COEFFICIENTS)}", field=f"{where}.{wrong[0]}")
    return LatencyCoefficients(*(float(flat[name]) for name in COEFFICIENTS))


def _settings(item: Fields, instances: tuple[InstanceSettings, ...]) -> SimulationSettings:
    failures = tuple(
        _failure(Fields(raw, f"{item.name('failures')}[{i}]")) for i, raw in enumerate(item.list("failures", []))
    )
    settings = SimulationSettings(tuple(replace(each, sleep_level=0) for each in instances))
    changes: dict[str, Any] = {"instances": instances, "failures": failures}
    for name in ("telemetry_period_s", "progress_s", "sample_s"):
        changes[name] = item.number(name, getattr(settings, name), above=0)
    for name in ("telemetry_delay_s", "network_s", "beside_s"):
        changes[name] = item.number(name, getattr(settings, name), above=-1e-12)
    for name in ("know_output", "leaps"):
        changes[name] = item.flag(name, getattr(settings, name))
    changes["elastic"] = _elastic(item.object("elastic"), instances[0]) if "elastic" in item else None
    if "mapping" in item:
        changes["mapping"] = _mapping(item.object("mapping"))
    if "links" in item:
        changes["links"] = _links(item.object("links"))
    if "machine_speed" in item:
        changes["machine_speed"] = _machine_speed(item.object("machine_speed"))
    if "pruning" in item:
        changes["pruning"] = _pruning(item.object("pruning"))
    changes["gateways"] = item.integer("gateways", settings.gateways)
    changes["cutoff_s"] = item.optional_number("cutoff_s", above=0)
    item.done()
    try:
        return replace(settings, **changes)
    except ConfigError as error:
        field = error.field or ""
        raise ConfigError(str(error), field=field if field.startswith("instances") else item.name(field)) from None


def _pruning(item: Fields) -> PruningSettings:
    common = PruningSettings(0.0)
    made = PruningSettings(
        drop_budget=item.number("drop_budget", above=-1e-12),
        every_s=item.number("every_s", common.every_s, above=0),
        delay_s=item.number("delay_s", common.delay_s, above=-1e-12),
    )
    item.done()
    return made


def _machine_speed(item: Fields) -> MachineSpeed:
    """`series`: measured speeds by period of `period_s`, one list per instance; each run begins at a moment drawn with
    its seed.
    """
    series = []
    for index, speeds in enumerate(item.list("series")):
        if not isinstance(speeds, list):
            raise ConfigError("series must be lists of numbers", field=f"{item.name('series')}[{index}]")
        series.append(tuple(item.check_number(speed, f"series[{index}]", -1e-12) for speed in speeds))
    period_s = item.number("period_s", 0.5, above=0)
    item.done()
    try:
        return MachineSpeed(tuple(series), period_s)
    except ConfigError as error:
        raise ConfigError(str(error), field=item.name(error.field or "")) from None


def _links(item: Fields) -> LinkSettings:
    common = LinkSettings()
    made = LinkSettings(
        bandwidth_gb_s=item.number("bandwidth_gb_s", common.bandwidth_gb_s, above=0),
        latency_s=item.number("latency_s", common.latency_s, above=-1e-12),
        scope=item.text("scope", common.scope, valid=SCOPES),
        overlap=item.flag("overlap", common.overlap),
        layers=item.integer("layers", common.layers),
        flow_policy=item.text("flow_policy", common.flow_policy, valid=LINK_POLICIES),
        failures=tuple(
            _link_failure(Fields(raw, f"{item.name('failures')}[{i}]"))
            for i, raw in enumerate(item.list("failures", []))
        ),
        ports=tuple(
            _port_speed(Fields(raw, f"{item.name('ports')}[{i}]")) for i, raw in enumerate(item.list("ports", []))
        ),
    )
    item.done()
    return made


def _port_speed(item: Fields) -> PortSpeed:
    made = PortSpeed(item.integer("instance", least=0), item.number("bandwidth_gb_s", above=0))
    item.done()
    return made


def _link_failure(item: Fields) -> LinkFailure:
    made = LinkFailure(
        item.integer("instance", least=0), item.number("at", above=-1e-12), item.number("for_s", above=0)
    )
    item.done()
    return made


def _elastic(item: Fields, first_of_all: InstanceSettings) -> ElasticSettings:
    """With `decode`, the other fields apply to prefill instances, otherwise to all."""
    model, usual = first_of_all.model, load_times(first_of_all.weights_of or first_of_all.model)
    decode = item.object("decode") if "decode" in item else None
    first = _scaling(item, ScalingConfig(model, "prefill" if decode is not None else "collocated"))
    second = _scaling(decode, ScalingConfig(model, "decode")) if decode is not None else None
    if decode is not None:
        decode.done()
    source = item.text("source", "device", valid=sorted(LOAD_S))
    load = item.object("load_s")
    seconds = {name: load.number(name, usual[name], above=-1e-12) for name in sorted(LOAD_S)}
    load.done()
    most, switch_s = item.optional_integer("most"), item.number("switch_s", 0.0, above=-1e-12)
    start_s, warm = item.number("start_s", 0.0, above=-1e-12), item.integer("warm", 0, least=0)
    sleep_level, wake_s = item.integer("sleep_level", 0, least=0), item.optional_number("wake_s", above=-1e-12)
    weights_gb = item.optional_number("weights_gb", above=0)
    item.done()
    try:
        return ElasticSettings(
            first, source, seconds, second, most, switch_s, start_s, warm, sleep_level, wake_s, weights_gb
        )
    except ConfigError as error:
        raise ConfigError(str(error), field=item.name(error.field or "")) from None


def _scaling(item: Fields, scaling: ScalingConfig) -> ScalingConfig:
    counts, names = ("min_instances", "max_instances"), ("upper", "lower", "sustain_s", "cooldown_s", "interval_s")
    bounds: dict[str, Any] = {name: item.integer(name, getattr(scaling, name), least=0) for name in counts}
    levels: dict[str, Any] = {name: item.number(name, getattr(scaling, name)) for name in names}
    try:
        return replace(scaling, **bounds, **levels)
    except ConfigError as error:
        raise ConfigError(str(error), field=item.name(error.field or "")) from None


def _mapping(item: Fields) -> MappingConfig:
    """`levels`, the most urgent first, each {ttft_s, tpot_s} with bounds +- `spread`."""
    levels = [Fields(raw, f"{item.name('levels')}[{i}]") for i, raw in enumerate(item.list("levels"))]
    if not levels:
        raise ConfigError("levels must not be empty", field=item.name("levels"))
    targets = [(level.number("ttft_s", above=0), level.number("tpot_s", above=0)) for level in levels]
    for level in levels:
        level.done()
    spread = item.number("spread", 0.25, above=-1e-12)
    if spread >= 1:
        raise ConfigError("spread must be below 1", field=item.name("spread"))
    made = around(
        targets,
        spread,
        window=item.integer("window", 1000, least=1),
        window_age_s=item.number("window_age_s", 300.0, above=0),
    )
    item.done()
    return made


def _failure(item: Fields) -> Failure:
    made = Failure(
        item.integer("instance", least=0), item.number("at", above=-1e-12), item.optional_number("for_s", above=0)
    )
    item.done()
    return made
