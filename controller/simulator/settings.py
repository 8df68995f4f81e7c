"""Settings of a run: instances, telemetry, clients and machines. Checked on construction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from controller.core.errors import ConfigError
from controller.core.snapshot import MappingConfig
from controller.core.types import InstanceSpec, LatencyCoefficients, Role
from controller.engine import EngineConfig, EngineScheduler, PreemptionConfig, PreemptivePrefill
from controller.flow.coordinator import CoordinatorConfig
from controller.policies.batching import Batching, selects
from controller.policies.batching.options import build
from controller.policies.batching.slo_aware_batching import SloAwareBatching
from controller.policies.by_stage import BY_STAGE, EngineKind, EnginePart, engine_part
from controller.predict.boundaries import ComposedBoundaries, ProfiledBoundaries, StepBoundaries, shape
from controller.predict.operator_profile import OperatorProfile
from controller.scale import ScalingConfig
from controller.simulator.load_times import LOAD_S
from controller.simulator.machine_speed import MachineSpeed
from controller.simulator.network import LinkSettings

ENGINE_KINDS = ("continuous", "preemptive_prefill", BY_STAGE)
BATCHING, MODEL_SHAPE = "chunked_prefill", "llama3-8b"  # if none is named
DECODE_BY = ("sum", "longest")
SLEEP_LEVELS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class InstanceSettings:
    """One engine.

    - `latency`: the true step times. `believed`: what the dispatcher starts from (None: the true ones). `profiled`
      False: it starts without a profile, as for an instance that was registered without one. `decode_by`:
      what a decode step's time grows with: the "sum" of its sequences' tokens (eq. 2), or the "longest" alone (Kairos,
      sec. 2.2).
    - `engine_kind` "preemptive_prefill" is FlowPrefill's scheduler: its rules are those of the `slo_aware_batching`
      policy (with predictions from the believed latency unless `batching_settings` has them), and `preemption` holds
      fields of PreemptionConfig. `model_shape` and `all_reduce_share` (of a step's linear time, under tensor
      parallelism) give the operators from which its boundaries are composed, unless `operators` has measured times.
      "slackline" is an engine with `--scheduler slackline`: scheduler and batching by `role` and `deadlines`
      (policies.by_stage).
    - `batching` None: chunked_prefill, or what the kind implies.
    - `from_s`, `until_s`: the second of the run at which it joins, and at which it begins to drain (None: never).
      `left`: it had left before the part of the run that is simulated; it keeps its number, which failures, ports and
      speeds refer to.
    - `sleep_level`: 1 or 2: it sleeps at this level when the run begins, until a scale-out wakes it; 0: it serves.
    - `first_token_with_kv`: as a decode instance it sends the first token once the KV has arrived, as the reference
      engine does. False: it computes that token, once it has a slot, and says nothing before, as vLLM and SGLang.
    """

    latency: LatencyCoefficients
    kv_tokens: int = 262_144
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    block_size: int = 16
    scheduling_policy: str = "priority"
    prefix_caching: bool = True
    batching: str | None = None
    batching_settings: Mapping[str, Any] = field(default_factory=dict)
    believed: LatencyCoefficients | None = None
    profiled: bool = True
    unit_cost: float = 1.0
    model: str = "model"
    weights_of: str = ""  # the model's usual name, such as Qwen2.5-7B, which selects load times
    role: str = "collocated"
    tensor_parallel: int = 1  # devices per instance; the profile is for all of them together
    kv_bytes_per_token: int = 131_072  # Llama-3.1-8B in 16 bits: 2 x 32 layers x 8 KV heads x 128 x 2 bytes
    engine_kind: str = "continuous"
    deadlines: bool = False  # for engine_kind slackline: requests have end-to-end deadlines or workflows
    preemption: Mapping[str, Any] = field(default_factory=dict)
    model_shape: str = MODEL_SHAPE
    all_reduce_share: float = 0.0
    decode_by: str = "sum"
    operators: OperatorProfile | None = None
    from_s: float = 0.0
    until_s: float | None = None
    left: bool = False
    sleep_level: int = 0
    first_token_with_kv: bool = True

    def __post_init__(self) -> None:
        if self.role not in list(Role):
            raise ConfigError(f"unknown role {self.role!r}; valid: {', '.join(sorted(Role))}", field="role")
        self.build_engine()
        if self.role == Role.DECODE and self.part.engine_kind != "continuous":
            raise ConfigError(
                "a decode instance is a continuous engine: the other takes over no KV", field="engine_kind"
            )
        if self.decode_by not in DECODE_BY:
            valid = ", ".join(DECODE_BY)
            raise ConfigError(f"unknown decode_by {self.decode_by!r}; valid: {valid}", field="decode_by")
        if not isinstance(self.weights_of, str):
            raise ConfigError(f"weights_of must be a model's name, not {self.weights_of!r}", field="weights_of")
        if self.operators is not None and self.all_reduce_share:
            raise ConfigError("measured operators hold their all-reduce", field="all_reduce_share")
        for name in ("tensor_parallel", "kv_bytes_per_token"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", field=name)
        self._check_presence()
        for flag in ("profiled", "first_token_with_kv"):
            if not isinstance(getattr(self, flag), bool):
                raise ConfigError(f"{flag} must be true or false", field=flag)
        if not self.profiled and self.believed is not None:
            raise ConfigError("an instance without a profile has no believed one", field="profiled")
        if min(self.latency) < 0:
            raise ConfigError("latency coefficients must not be negative", field="latency")
        if self.latency.prefill_a + self.latency.prefill_b <= 0 or self.latency.decode_a + self.latency.decode_c <= 0:
            raise ConfigError("a step must take time: prefill a + b and decode a + c must be positive", field="latency")

    def _check_presence(self) -> None:
        if not 0 <= self.from_s < math.inf:
            raise ConfigError("from_s must be 0 seconds or more", field="from_s")
        if self.until_s is not None and not self.from_s < self.until_s < math.inf:
            raise ConfigError("until_s must be later than from_s", field="until_s")
        _check_sleep_level(self.sleep_level)
        if self.sleep_level and (self.from_s or self.until_s is not None):
            raise ConfigError("an instance that begins asleep has no from_s or until_s", field="sleep_level")

    def engine_config(self) -> EngineConfig:
        if self.scheduling_policy not in ("priority", "fcfs"):
            raise ConfigError(
                f"unknown scheduling_policy {self.scheduling_policy!r}; valid: fcfs, priority",
                field="scheduling_policy",
            )
        return EngineConfig(
            kv_blocks=self.kv_tokens // self.block_size,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            scheduling_policy="priority" if self.scheduling_policy == "priority" else "fcfs",
            prefix_caching=self.prefix_caching,
        )

    @property
    def part(self) -> EnginePart:
        """Names of the scheduler and its batching policy. Raises ConfigError as `build_engine`."""
        if self.engine_kind not in ENGINE_KINDS:
            valid = ", ".join(ENGINE_KINDS)
            raise ConfigError(f"unknown engine_kind {self.engine_kind!r}; valid: {valid}", field="engine_kind")
        if not isinstance(self.deadlines, bool):
            raise ConfigError("deadlines must be true or false", field="deadlines")
        if self.engine_kind == BY_STAGE:
            if self.batching is not None:
                raise ConfigError(f"engine_kind {BY_STAGE} chooses it by role", field="batching")
            return engine_part(Role(self.role), self.deadlines)
        if self.deadlines:
            raise ConfigError(f"deadlines needs engine_kind {BY_STAGE}", field="deadlines")
        kind: EngineKind = "preemptive_prefill" if self.engine_kind == "preemptive_prefill" else "continuous"
        return EnginePart(kind, self.batching or BATCHING)

    def build_engine(self) -> EngineScheduler:
        """A new engine for each run. Raises ConfigError for a setting that is invalid or has no effect here."""
        kind = self.part.engine_kind
        batching = self.build_batching()
        if kind == "continuous":
            if self.preemption:
                raise ConfigError("preemption needs a preemptive_prefill engine", field="preemption")
            return EngineScheduler(self.engine_config(), batching)
        if not isinstance(batching, SloAwareBatching):
            raise ConfigError("engine_kind preemptive_prefill needs batching slo_aware_batching", field="batching")
        self.build_boundaries()
        return PreemptivePrefill(self.engine_config(), batching, self.preemption_config())

    def preemption_config(self) -> PreemptionConfig:
        valid = set(PreemptionConfig.__dataclass_fields__)
        if unknown := sorted(set(self.preemption) - valid):
            names = ", ".join(sorted(valid))
            raise ConfigError(
                f"preemption has no setting {unknown[0]!r}; valid: {names}", field=f"preemption.{unknown[0]}"
            )
        believed = self.believed or self.latency
        decode = {name: getattr(believed, name) for name in ("decode_a", "decode_b", "decode_c")}
        return PreemptionConfig(**{**decode, **self.preemption})

    def build_boundaries(self) -> StepBoundaries:
        kind = self.preemption_config().boundary
        composed = ComposedBoundaries(kind, shape(self.model_shape), self.latency, self.all_reduce_share)
        return composed if self.operators is None else ProfiledBoundaries(kind, self.operators)

    def build_batching(self) -> Batching:
        """The batching policy, with predictions from the believed profile if it needs them."""
        part, believed = self.part, self.believed or self.latency
        given = dict(self.batching_settings)
        if self.engine_kind == BY_STAGE:
            given = part.options_for(believed, self.max_num_batched_tokens) | given
        elif part.engine_kind == "preemptive_prefill" and part.batching == SloAwareBatching.name:
            given = {each: getattr(believed, each) for each in ("prefill_a", "prefill_b", "prefill_c")} | given
        return build(part.batching, given, "batching_settings")

    def spec(self, instance_id: str) -> InstanceSpec:
        return InstanceSpec(
            id=instance_id,
            model=self.model,
            backend="simulated",
            role=Role(self.role),
            max_num_seqs=self.max_num_seqs,
            kv_capacity_tokens=self.kv_tokens // self.block_size * self.block_size,
            max_model_len=self.max_model_len,
            unit_cost=self.unit_cost * self.tensor_parallel,
            latency=(self.believed or self.latency) if self.profiled else None,
            selects=selects(self.part.batching),
            first_token_with_kv=self.first_token_with_kv,
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """An instance fails at `at`; a replacement is up `for_s` later (None: never).

    With `weights_gb` of ElasticSettings the end of that time is its weight load, which may take longer.
    """

    instance: int
    at: float
    for_s: float | None = None

    def __post_init__(self) -> None:
        if self.at < 0:
            raise ConfigError("a failure's time must not be negative", field="failures.at")
        if self.for_s is not None and self.for_s <= 0:
            raise ConfigError("for_s must be positive seconds", field="failures.for_s")


@dataclass(frozen=True, slots=True)
class ElasticSettings:
    """How the fleet scales.

    - `scaling`: of the collocated instances; with roles, of those that prefill, and `decode` of those that decode.
      `most`: limit on instances of all roles together; None: the sum of both limits.
    - `source`: where weights are loaded from; "device" needs an instance that is up, otherwise "disk" is used.
      `load_s`: seconds from the decision to serving, by source (defaults by model: load_times.py).
    - `weights_gb`: 1e9 bytes of weights. A load from a device, by a new instance or a replacement, is a transfer of
      that size between the ports of two instances: it takes its `load_s` on links that are idle and wide enough, and
      longer on others. None: it takes that time whatever the links do.
    - `start_s`: from nothing to a process that can load weights, before the load time. `warm`: number of warm spares,
      which are in that state (Fast Scaling).
    - `switch_s`: from empty in one role to serving in the other (weights stay; engines serve any role, sec. 6).
    - `sleep_level`: instances that scale in sleep at this level, 1 or 2, instead of being stopped (0). `wake_s`:
      seconds from the decision to serving. None: the load time from host memory at level 1, which keeps a copy there,
      and that from `source` at level 2.
    """

    scaling: ScalingConfig
    source: str = "device"
    load_s: Mapping[str, float] = field(default_factory=lambda: dict(LOAD_S))
    decode: ScalingConfig | None = None
    most: int | None = None
    switch_s: float = 0.0
    start_s: float = 0.0
    warm: int = 0
    sleep_level: int = 0
    wake_s: float | None = None
    weights_gb: float | None = None

    def __post_init__(self) -> None:
        roles = ("collocated",) if self.decode is None else ("prefill", "decode")
        for config, role in zip((self.scaling, self.decode), roles, strict=False):
            if config is not None and config.role != role:
                raise ConfigError(f"this scaling is of role {role}, not {config.role}", field="scaling.role")
        if self.most is not None and self.most < 1:
            raise ConfigError("most must be at least 1 instance", field="most")
        for name in ("switch_s", "start_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative", field=name)
        if self.warm < 0:
            raise ConfigError("warm must be 0 instances or more", field="warm")
        _check_sleep_level(self.sleep_level)
        if self.wake_s is not None and not 0 <= self.wake_s < math.inf:
            raise ConfigError("wake_s must be 0 seconds or more", field="wake_s")
        if self.warm and not self.start_s:
            raise ConfigError("a warm instance spares start_s, which is 0", field="warm")
        self._check_weights()

    def _check_weights(self) -> None:
        if set(self.load_s) != set(LOAD_S):
            raise ConfigError(f"load_s needs seconds for each of: {', '.join(sorted(LOAD_S))}", field="load_s")
        if self.source not in LOAD_S:
            raise ConfigError(f"unknown source {self.source!r}; valid: {', '.join(sorted(LOAD_S))}", field="source")
        if min(self.load_s.values()) < 0:
            raise ConfigError("load times must not be negative", field="load_s")
        if self.weights_gb is None:
            return
        if not 0 < self.weights_gb < math.inf:
            raise ConfigError("weights_gb must be positive and finite", field="weights_gb")
        if self.source != "device":
            raise ConfigError("only weights from a device take a link", field="weights_gb")


@dataclass(frozen=True, slots=True)
class PruningSettings:
    """Pruning over the queues of all gateways. `every_s`: shortest time between two orders. `delay_s`: from a report of
    the queues until gateways enforce the orders."""

    drop_budget: float
    every_s: float = 0.05
    delay_s: float = 0.02

    def __post_init__(self) -> None:
        CoordinatorConfig(drop_budget=self.drop_budget)
        if not self.every_s > 0:
            raise ConfigError("every_s must be positive seconds", field="every_s")
        if not 0 <= self.delay_s < math.inf:
            raise ConfigError("delay_s must be 0 seconds or more", field="delay_s")


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """The whole run. Seconds throughout.

    - `telemetry_*`: how often engines are polled, and how old the answer is when it arrives. `progress_s`: how often
      the gateway reports tokens to the dispatcher. `network_s`: one way between gateway and engine.
    - `cutoff_s`: clients give up this long after the last arrival (None: never). `know_output`: the dispatcher knows
      true output lengths (an oracle) instead of predictions.
    - `leaps` off runs every step as a happening of its own; results are the same.
    - `elastic`: None: the fleet does not scale. `mapping`: requests only name their priority, which gives their
      targets; None: they have their own. `links`: the network between instances with roles. `machine_speed`: measured
      speed over time; None: always as fitted. `beside_s`: how much longer a step takes while another instance runs one,
      as where servers share the cores of one machine; then there are no leaps.
    - `gateways`: take requests in turn, each with a dispatcher and a migrator of its own.
    - `pruning`: None: nothing is pruned.
    """

    instances: tuple[InstanceSettings, ...]
    telemetry_period_s: float = 1.0
    telemetry_delay_s: float = 0.0
    progress_s: float = 0.25
    network_s: float = 0.0
    cutoff_s: float | None = None
    know_output: bool = False
    leaps: bool = True
    sample_s: float = 1.0
    failures: tuple[Failure, ...] = ()
    elastic: ElasticSettings | None = None
    mapping: MappingConfig | None = None
    links: LinkSettings = field(default_factory=LinkSettings)
    machine_speed: MachineSpeed | None = None
    beside_s: float = 0.0
    gateways: int = 1
    pruning: PruningSettings | None = None

    @property
    def disaggregated(self) -> bool:
        """Whether some instances only prefill and others only decode."""
        return any(instance.role != Role.COLLOCATED for instance in self.instances)

    def __post_init__(self) -> None:
        self._check_counts()
        roles = {instance.role for instance in self.instances}
        if (Role.PREFILL in roles) != (Role.DECODE in roles):
            raise ConfigError(
                "prefill instances need decode instances, and the other way round", field="instances.role"
            )
        for field_name, failures in (("links.failures", self.links.failures), ("failures", self.failures)):
            for failure in failures:
                if not 0 <= failure.instance < len(self.instances):
                    raise ConfigError(f"there is no instance {failure.instance}", field=f"{field_name}.instance")
        for name in ("telemetry_period_s", "progress_s", "sample_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive seconds", field=name)
        for name in ("telemetry_delay_s", "network_s", "beside_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative", field=name)
        if self.cutoff_s is not None and self.cutoff_s <= 0:
            raise ConfigError("cutoff_s must be positive seconds", field="cutoff_s")
        if self.machine_speed is not None and any(each.part.engine_kind != "continuous" for each in self.instances):
            raise ConfigError("only continuous engines run at a measured machine_speed", field="machine_speed")
        if self.beside_s and any(each.part.engine_kind != "continuous" for each in self.instances):
            raise ConfigError("only continuous engines take longer beside others", field="beside_s")
        self._check_sleepers()
        if self.elastic is not None:
            self._check_elastic(self.elastic)

    def _check_counts(self) -> None:
        for name, count in (("instance", len(self.instances)), ("gateway", self.gateways)):
            if count < 1:
                raise ConfigError(f"at least one {name} is needed", field=f"{name}s")

    def _check_sleepers(self) -> None:
        asleep = [bool(instance.sleep_level) for instance in self.instances]
        if all(asleep):
            raise ConfigError("at least one instance must be awake when the run begins", field="instances.sleep_level")
        if any(asleep) and self.elastic is None:
            raise ConfigError(
                "only a scale-out wakes a sleeper: give `elastic` settings", field="instances.sleep_level"
            )

    def _check_elastic(self, elastic: ElasticSettings) -> None:
        if self.disaggregated != (elastic.decode is not None):
            raise ConfigError(
                "instances with roles need a scaling for decode, others have none", field="elastic.decode"
            )
        awake = [each for each in self.instances if not each.sleep_level]
        for config in (elastic.scaling, elastic.decode):
            if config is not None and sum(each.role == config.role for each in awake) > config.max_instances:
                raise ConfigError("there are more instances than max_instances", field="elastic.max_instances")
        if elastic.most is not None and len(awake) > elastic.most:
            raise ConfigError("there are more instances than `most`", field="elastic.most")


def _check_sleep_level(level: int) -> None:
    if type(level) is not int or level not in SLEEP_LEVELS:  # JSON's true would be 1 in Python
        told = "0 (awake), 1 (a copy of the weights stays in host memory) or 2 (no copy)"
        raise ConfigError(f"sleep_level must be {told}, not {level!r}", field="sleep_level")
