"""The current fleet as input of the simulator: instances with their fitted latency, and optionally more or fewer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from controller.core.errors import ConfigError
from controller.core.types import LatencyCoefficients, Role
from controller.engine.process_spec import BLOCK_SIZE, PREEMPTIVE_BATCHING, whole_number
from controller.models import Instance, ServedModel
from controller.policies.by_stage import BY_STAGE, SCHEDULERS, engine_part, scheduler_of
from controller.selectors.fleet.latency_fits import Fits, active_fits

# How each kind of engine batches by default (workers.engine.config; vLLM's V1 scheduler).
BATCHING: Mapping[str, str] = {"reference": "chunked_prefill", "vllm": "vllm_v1"}
USUAL_BATCHING = "vllm_v1"
STEP_TOKENS = 2048
TOLD = ("scheduling_policy", "block_size", "max_num_batched_tokens")  # options with the same names in the simulator
MOST_CHANGED = 64
MOST_INSTANCES = 256


class NobodyServes(ConfigError):
    """No instance serves now. Callers that offer another fleet catch this."""


def default_model() -> str | None:
    """The model with the most serving instances."""
    names = list(Instance.objects.serving().values_list("model__name", flat=True))
    if names:
        return max(sorted(set(names)), key=names.count)
    return ServedModel.objects.order_by("name").values_list("name", flat=True).first()


def fleet_today(model: str, change: int = 0, field: str = "instances", role: str | None = None) -> list[dict[str, Any]]:
    """Groups of equal instances as the simulator's JSON. `change`: add so many like the last one of `role`, or remove
    so many of them. Without `role`, the role that most instances have.

    Raises ConfigError naming `field`: no instance serves, none of a role would be left, or one has no latency profile.
    """
    rows = list(Instance.objects.serving().select_related("model").filter(model__name=model).order_by("id"))
    if not rows:
        raise NobodyServes(f"no instance serves {model!r} now, so there is no current fleet", field=field)
    check_change(change, field)
    size = len(rows) + change
    if not 1 <= size <= MOST_INSTANCES:
        raise ConfigError(
            f"{model!r} has {len(rows)} instances: {change:+d} would leave {size}; 1 to {MOST_INSTANCES} are needed",
            field=f"{field}.change",
        )
    fits = active_fits(row.model_id for row in rows)
    return grouped([_instance(row, fits, field) for row in _resized(rows, change, field, role)])


def in_role(name: str, role: str, field: str = "instances") -> dict[str, Any]:
    """One current instance as its own group, in a role that it had before. Raises ConfigError as `fleet_today`."""
    row = Instance.objects.select_related("model").get(pk=name)
    row.role = role
    return {**_instance(row, active_fits([row.model_id]), field), "count": 1}


def check_change(change: int, field: str) -> None:
    if abs(change) > MOST_CHANGED:
        raise ConfigError(f"at most {MOST_CHANGED} instances more or less", field=f"{field}.change")


def _resized(rows: Sequence[Instance], change: int, field: str, role: str | None) -> list[Instance]:
    """Instances of a role are adjacent, since equal ones form one group."""
    by_role = {name: [row for row in rows if row.role == name] for name in sorted({row.role for row in rows})}
    role = role or max(by_role, key=lambda name: len(by_role[name]))
    if role not in by_role:
        raise ConfigError(f"no instance has the role {role!r}; valid: {', '.join(by_role)}", field=f"{field}.role")
    mine = by_role[role]
    if len(mine) + change < 1:
        raise ConfigError(f"{change:+d} would leave 0 {role} instances of {len(mine)}", field=f"{field}.change")
    by_role[role] = mine[: len(mine) + change] if change <= 0 else mine + [mine[-1]] * change
    return [row for each in by_role.values() for row in each]


def grouped(instances: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    for each in instances:
        if groups and {**groups[-1], "count": 0} == {**each, "count": 0}:
            groups[-1]["count"] += 1
        else:
            groups.append({**each, "count": 1})
    return groups


def size_of(instances: Any) -> int:
    """The number of instances in a simulator's JSON."""
    groups = instances if isinstance(instances, list) else [instances]
    return sum(group.get("count", 1) for group in groups if isinstance(group, Mapping))


def _instance(row: Instance, fits: Fits, field: str) -> dict[str, Any]:
    fit = fits.of(row)
    if fit is None:
        raise ConfigError(
            f"instance {row.id} ({row.device_kind or 'no device kind'}, tp {row.tp}) has no latency profile; measure "
            "it with python -m workers.profiler",
            field=field,
        )
    told = row.spec if row.backend == "reference" else {}
    kv_tokens = _kv_tokens(row.spec)
    longest = whole_number(row.spec, "max_model_len") or row.model.context_tokens
    found: dict[str, Any] = {
        "profile": dict(fit.coefficients),
        "max_num_seqs": row.max_num_seqs,
        "max_num_batched_tokens": max(STEP_TOKENS, row.max_num_seqs),
        "max_model_len": min(longest, kv_tokens) if kv_tokens else longest,
        "unit_cost": row.unit_cost,
        "model": row.model.name,
        **{name: told[name] for name in TOLD if told.get(name) is not None},
        **({"batching_settings": told["batching_options"]} if told.get("batching_options") else {}),
    }
    found |= _scheduler(row, told, field)
    if _scheduler_name(row, told) == BY_STAGE and row.role_at_start != row.role:
        found |= _of_its_start(row, told, found, field)
    if kv_tokens:
        found["kv_tokens"] = kv_tokens
    elif longest > 200_000:  # more than the default of the simulator holds
        found["kv_tokens"] = 2 * longest
    if row.role != "collocated":
        found["role"] = row.role
    return found


def _kv_tokens(spec: Mapping[str, Any]) -> int | None:
    """The KV capacity it was started with; None: not specified."""
    blocks = whole_number(spec, "kv_blocks")
    if blocks is not None:
        return blocks * (whole_number(spec, "block_size") or BLOCK_SIZE)
    return whole_number(spec, "kv_capacity_tokens")


def _scheduler_name(row: Instance, told: Mapping[str, Any]) -> str:
    return scheduler_of(told, Role(row.role_at_start)) if row.backend == "reference" else "continuous"


def _scheduler(row: Instance, told: Mapping[str, Any], field: str) -> dict[str, Any]:
    """The engine's scheduler by its name in the simulator. Raises ConfigError if the simulator has no such engine."""
    name = _scheduler_name(row, told)
    if name not in SCHEDULERS:
        raise ConfigError(
            f"instance {row.id} runs scheduler {name!r}, which the simulator does not know; known: "
            f"{', '.join(SCHEDULERS)}",
            field=field,
        )
    batching = told.get("batching") or None
    if name == "continuous":
        return {"batching": batching or BATCHING.get(row.backend, USUAL_BATCHING)}
    if name == BY_STAGE:
        return {"engine_kind": SCHEDULERS[name]} | ({"deadlines": True} if told.get("deadlines") is True else {})
    _check_takes_kv(row, name, field)
    preemption = {each: told[each] for each in ("boundary", "chunk_tokens") if told.get(each) is not None}
    found = {"engine_kind": SCHEDULERS[name], "batching": batching or PREEMPTIVE_BATCHING}
    return found | ({"preemption": preemption} if preemption else {})


def _of_its_start(row: Instance, told: Mapping[str, Any], found: Mapping[str, Any], field: str) -> dict[str, Any]:
    """The scheduler that the started role chose, written out, since the simulator would choose by the current role."""
    part = engine_part(Role(row.role_at_start), told.get("deadlines") is True)
    if part.engine_kind != SCHEDULERS["continuous"]:
        _check_takes_kv(row, f"{BY_STAGE} as it started ({row.role_at_start})", field)
    options = part.options_for(LatencyCoefficients(**found["profile"]), found["max_num_batched_tokens"])
    settings = options | found.get("batching_settings", {})
    return {
        "engine_kind": part.engine_kind,
        "batching": part.batching,
        "deadlines": False,  # `batching` has the result
        **({"batching_settings": settings} if settings else {}),
    }


def _check_takes_kv(row: Instance, scheduler: str, field: str) -> None:
    if row.role == Role.DECODE:
        raise ConfigError(
            f"instance {row.id} decodes under scheduler {scheduler!r}; the simulated engine of that kind takes over "
            "no KV",
            field=field,
        )
