"""The fleet as the simulator takes it: today's instances with their fitted latency, one more or less of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from controller.core.errors import ConfigError
from controller.models import Instance, LatencyProfile, ServedModel

# How an engine of this kind batches, as its own defaults say (workers.engine.config, vLLM's V1 scheduler).
BATCHING: Mapping[str, str] = {"reference": "chunked_prefill", "vllm": "vllm_v1"}
USUAL_BATCHING = "vllm_v1"
STEP_TOKENS = 2048
MOST_CHANGED = 64
MOST_INSTANCES = 256


def default_model() -> str | None:
    """The model with the most serving instances."""
    names = list(Instance.objects.serving().values_list("model__name", flat=True))
    if names:
        return max(sorted(set(names)), key=names.count)
    return ServedModel.objects.order_by("name").values_list("name", flat=True).first()


def fleet_today(model: str, change: int = 0, field: str = "instances") -> list[dict[str, Any]]:
    """Groups of equal instances as the simulator's JSON. `change`: so many more of the last group's, or fewer.

    Raises ConfigError naming `field`: nothing serves, nothing would be left, or an instance was never profiled.
    """
    rows = list(Instance.objects.serving().select_related("model").filter(model__name=model).order_by("id"))
    if not rows:
        raise ConfigError(f"no instance serves {model!r} now; choose a shipped profile instead", field=field)
    if abs(change) > MOST_CHANGED:
        raise ConfigError(f"at most {MOST_CHANGED} instances more or less", field=f"{field}.change")
    size = len(rows) + change
    if not 1 <= size <= MOST_INSTANCES:
        raise ConfigError(
            f"{model!r} has {len(rows)} instances: {change:+d} would leave {size}; 1 to {MOST_INSTANCES} are needed",
            field=f"{field}.change",
        )
    speeds = _speeds(rows)
    each = [_instance(row, speeds, field) for row in rows]
    each = each[:size] if change <= 0 else each + [each[-1]] * change
    return grouped(each)


def grouped(instances: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    for each in instances:
        if groups and {**groups[-1], "count": 0} == {**each, "count": 0}:
            groups[-1]["count"] += 1
        else:
            groups.append({**each, "count": 1})
    return groups


def size_of(instances: Any) -> int:
    """Instances of a simulator's JSON."""
    groups = instances if isinstance(instances, list) else [instances]
    return sum(group.get("count", 1) for group in groups if isinstance(group, Mapping))


def _speeds(rows: Sequence[Instance]) -> dict[tuple[int, str, int, str], Mapping[str, float]]:
    active = LatencyProfile.objects.filter(active=True, model_id__in={row.model_id for row in rows})
    return {(each.model_id, each.device_kind, each.tp, each.role): each.coefficients for each in active}


def _instance(row: Instance, speeds: Mapping[Any, Mapping[str, float]], field: str) -> dict[str, Any]:
    speed = speeds.get((row.model_id, row.device_kind, row.tp, row.role))
    if speed is None:
        raise ConfigError(
            f"instance {row.id} ({row.device_kind or 'no device kind'}, tp {row.tp}) has no latency profile; measure "
            "it with python -m workers.profiler",
            field=field,
        )
    kv_tokens = row.spec.get("kv_capacity_tokens")
    longest = row.spec.get("max_model_len") or row.model.context_tokens
    found: dict[str, Any] = {
        "profile": dict(speed),
        "max_num_seqs": row.max_num_seqs,
        "max_num_batched_tokens": max(STEP_TOKENS, row.max_num_seqs),
        "max_model_len": min(longest, kv_tokens) if kv_tokens else longest,
        "batching": BATCHING.get(row.backend, USUAL_BATCHING),
        "unit_cost": row.unit_cost,
        "model": row.model.name,
    }
    if kv_tokens:
        found["kv_tokens"] = kv_tokens
    elif longest > 200_000:  # more than the simulator's own default holds
        found["kv_tokens"] = 2 * longest
    if row.role != "collocated":
        found["role"] = row.role
    return found
