"""What a gateway tells the plug-in about a request, in vLLM's `vllm_xargs`: how it is written and how it is read.

Times are what is *left*, in seconds, because the two machines' clocks need not agree; the plug-in adds them to its own
clock once, when the request arrives. A value that is no finite number, or out of bounds, counts as not given: the
server also takes requests from elsewhere, and none may stop it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from controller.core.told_hints import LONGEST_NAME, LONGEST_S, MOST_TOKENS, NO_HINTS, ToldHints

PREFIX = "slackline_"  # the gateway strips a client's own entries of this prefix
TTFT_LEFT, TTFT, TPOT = f"{PREFIX}ttft_left", f"{PREFIX}ttft", f"{PREFIX}tpot"
VALUE = f"{PREFIX}value"
MOST_VALUE = 1e6
ANNOUNCED = "slackline:vllm_plugin_info"  # the metric by which a server says that it reads hints


class PluginHints(NamedTuple):
    """Targets of a request. Seconds; infinite: none. `ttft_left_s`: of `ttft_s`, negative once it is late. `told`: what
    reference engines are told too."""

    ttft_left_s: float = math.inf
    ttft_s: float = math.inf
    tpot_s: float = math.inf
    value: float = 1.0
    told: ToldHints = NO_HINTS


def hint_fields(hints: PluginHints, told: Mapping[str, float | int | str] | None = None) -> dict[str, float | str]:
    """Entries of `vllm_xargs`; what is infinite or usual is left out. `told`: fields as a reference engine gets them,
    in place of `hints.told`."""
    found: dict[str, float | str] = {f"{PREFIX}{name}": value for name, value in (told or {}).items()}
    if math.isfinite(hints.ttft_s):
        found[TTFT] = round(min(hints.ttft_s, LONGEST_S), 6)
        found[TTFT_LEFT] = round(max(-LONGEST_S, min(hints.ttft_left_s, LONGEST_S)), 6)
    if math.isfinite(hints.tpot_s):
        found[TPOT] = round(min(hints.tpot_s, LONGEST_S), 6)
    if hints.value != 1.0:
        found[VALUE] = round(hints.value, 6)
    return found


def read_hints(extras: Mapping[str, object] | None) -> PluginHints:
    if not extras:
        return PluginHints()
    ttft_s = _number(extras.get(TTFT), 0.0, LONGEST_S)
    left_s = _number(extras.get(TTFT_LEFT), -LONGEST_S, LONGEST_S)
    if ttft_s is None or left_s is None:
        ttft_s = left_s = math.inf
    tpot_s = _number(extras.get(TPOT), 0.0, LONGEST_S)
    value = _number(extras.get(VALUE), 0.0, MOST_VALUE)
    return PluginHints(
        min(left_s, ttft_s), ttft_s, math.inf if tpot_s is None else tpot_s, 1.0 if value is None else value,
        _told(extras),
    )  # fmt: skip


def _told(extras: Mapping[str, object]) -> ToldHints:
    due_s, workflow_s = (
        _number(extras.get(f"{PREFIX}{name}"), -LONGEST_S, LONGEST_S) for name in ("due_in", "workflow_due_in")
    )
    lower = _number(extras.get(f"{PREFIX}length_lower"), 0, MOST_TOKENS)
    upper = _number(extras.get(f"{PREFIX}length_upper"), 1, MOST_TOKENS)
    return ToldHints(
        math.inf if due_s is None else due_s,
        math.inf if workflow_s is None else workflow_s,
        (int(lower), int(upper)) if lower is not None and upper is not None and lower <= upper else None,
        _name(extras.get(f"{PREFIX}workflow")),
        tenant=_name(extras.get(f"{PREFIX}tenant")),
    )


def _name(given: object) -> str:
    return given if isinstance(given, str) and len(given) <= LONGEST_NAME else ""


def _number(given: object, least: float, most: float) -> float | None:
    if isinstance(given, bool) or not isinstance(given, int | float):
        return None
    return float(given) if least <= given <= most else None
