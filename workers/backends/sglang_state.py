"""What an SGLang server (0.5.23) reports of itself: `/server_info`, `/v1/loads` and the metrics page, as values.

`/v1/loads` is at most some decode steps old and always there; the metrics page needs `--enable-metrics` and is the only
source of token totals. Both are summed over data-parallel ranks; the KV usage is that of the fullest rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from controller.core.types import Load, Role
from workers.backends.base import EngineError

MODES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "null": Role.COLLOCATED}
GRAPHS = ("decode_cuda_graph_bs", "decode_cuda_graph_memory_gb")
BOOTSTRAP_PORT = 8998  # SGLang's default

# Entries of /v1/loads' `disaggregation` that wait: on a prefill engine, on a decode engine.
QUEUES: Mapping[Role, tuple[str, ...]] = {
    Role.PREFILL: ("prefill_bootstrap_queue_reqs", "prefill_inflight_queue_reqs"),
    Role.DECODE: ("decode_prealloc_queue_reqs", "decode_transfer_queue_reqs", "decode_retracted_queue_reqs"),
    Role.COLLOCATED: (),
}


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Resolved arguments, and the role that its scheduler has now (a switch changes the role, not the argument)."""

    role: Role
    arguments: Mapping[str, Any] = field(default_factory=dict)
    graphs: Mapping[str, Any] = field(default_factory=dict)  # of captured decode graphs, if any

    def on(self, name: str) -> bool:
        return bool(self.arguments.get(name))

    @property
    def low_first(self) -> bool:
        return self.on("schedule_low_priority_values_first")

    @property
    def bootstrap_port(self) -> int:
        return int(self.arguments.get("disaggregation_bootstrap_port") or BOOTSTRAP_PORT)

    @property
    def transfer_backend(self) -> str:
        return str(self.arguments.get("disaggregation_transfer_backend") or "mooncake")


def parse_info(raw: bytes) -> ServerInfo:
    """Raises EngineError for anything but a server's description."""
    said = _json(raw, "/server_info")
    states = said.get("internal_states") or [{}]
    state = states[0] if isinstance(states, list) and isinstance(states[0], dict) else {}
    mode = str(state.get("disaggregation_mode") or said.get("disaggregation_mode") or "null")
    if mode not in MODES:
        raise EngineError(f"SGLang reports an unknown disaggregation_mode: {mode!r}")
    graphs = {name: state[name] for name in GRAPHS if state.get(name) is not None}
    return ServerInfo(MODES[mode], said, graphs)


def parse_loads(raw: bytes, now: float, role: Role) -> Load:
    """`/v1/loads` as a Load. Requests that wait for a peer count as waiting."""
    ranks = _ranks(raw)
    return Load(
        observed_at=now,
        running=sum(_count(rank, "num_running_reqs") for rank in ranks),
        waiting=sum(_count(rank, "num_waiting_reqs") + _queued(rank, QUEUES[role]) for rank in ranks),
        kv_usage=max(_figure(rank, "token_usage") for rank in ranks),
        kv_capacity_tokens=sum(_count(rank, "max_total_num_tokens") for rank in ranks) or None,
        max_num_seqs=sum(_count(rank, "max_running_requests") for rank in ranks) or None,
    )


def busy_with(raw: bytes) -> str:
    """What keeps the server from being fully idle, with its counts; "" when nothing does."""
    ranks = _ranks(raw)
    figures = {name: sum(_count(rank, name) for rank in ranks) for name in ("num_running_reqs", "num_waiting_reqs")}
    for names in QUEUES.values():
        figures |= {name: sum(_queued(rank, (name,)) for rank in ranks) for name in names}
    return ", ".join(f"{name} {value}" for name, value in figures.items() if value)


def _ranks(raw: bytes) -> list[Mapping[str, Any]]:
    loads = _json(raw, "/v1/loads").get("loads")
    if not isinstance(loads, list) or not loads or not all(isinstance(each, dict) for each in loads):
        raise EngineError("SGLang's /v1/loads names no rank")
    return loads


def _count(rank: Mapping[str, Any], name: str) -> int:
    return int(_figure(rank, name))


def _figure(rank: Mapping[str, Any], name: str) -> float:
    value = rank.get(name) or 0
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise EngineError(f"SGLang reports {name} {str(value)[:30]!r}; expected a number")
    return value


def _queued(rank: Mapping[str, Any], names: Iterable[str]) -> int:
    queues = rank.get("disaggregation")
    return sum(_count(queues, name) for name in names) if isinstance(queues, dict) else 0


def _json(raw: bytes, path: str) -> dict[str, Any]:
    try:
        said = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise EngineError(f"SGLang answered {path} with something that is not JSON") from error
    if not isinstance(said, dict):
        raise EngineError(f"SGLang answered {path} with no object")
    return said


# ---- the metrics page ---------------------------------------------------------------------------------------------

_LABEL = re.compile(r'(\w+)="([^"]*)"')
_GAUGES = {
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:num_prefill_bootstrap_queue_reqs": "waiting",
    "sglang:num_prefill_inflight_queue_reqs": "waiting",
    "sglang:num_decode_prealloc_queue_reqs": "waiting",
    "sglang:num_decode_transfer_queue_reqs": "waiting",
    "sglang:max_total_num_tokens": "capacity",
    "sglang:token_usage": "usage",
}
_COUNTERS = {
    "sglang:prompt_tokens_total": "prompt_tokens_total",
    "sglang:generation_tokens_total": "generation_tokens_total",
    "sglang:cached_tokens_total": "cached_tokens_total",
}


def parse_metrics(text: str) -> dict[str, float]:
    """`running`, `waiting`, `capacity`, `usage` and the three token totals, as far as the page has them.

    Gauges: with priority scheduling there is a series for each priority and one with an empty label, their sum, which
    alone counts; ranks of one model copy report the same, so the largest counts; data-parallel ranks are summed.
    Raises EngineError for a figure that is not a finite number.
    """
    series: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in _GAUGES or name in _COUNTERS:
            series.setdefault(name, []).append((dict(_LABEL.findall(line)), _number(line)))
    found: dict[str, float] = {}
    for name, values in series.items():
        if name in _COUNTERS:
            found[_COUNTERS[name]] = sum(value for _, value in values)
            continue
        ranks = _by_rank(values)
        what = _GAUGES[name]
        found[what] = max(ranks) if what == "usage" else found.get(what, 0.0) + sum(ranks)
    return {what: _figure(found, what) for what in found}


def _number(line: str) -> float:
    said = line.rsplit(" ", 1)[-1]
    try:
        value = float(said)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise EngineError(f"SGLang reports {line[:60]!r}; expected a number")
    return value


def load_of(seen: Mapping[str, float], now: float) -> Load:
    """The page's gauges as a Load. A series that is not there yet counts as 0."""
    return Load(
        observed_at=now,
        running=_count(seen, "running"),
        waiting=_count(seen, "waiting"),
        kv_usage=_figure(seen, "usage"),
        kv_capacity_tokens=_count(seen, "capacity") or None,
    )


def _by_rank(values: list[tuple[Mapping[str, str], float]]) -> list[float]:
    totals = [each for each in values if each[0].get("priority") == ""] or values
    ranks: dict[str, float] = {}
    for labels, value in totals:
        rank = labels.get("dp_rank", "")
        ranks[rank] = max(ranks.get(rank, 0.0), value)
    return list(ranks.values())
