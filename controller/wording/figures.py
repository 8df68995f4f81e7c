"""Recorded figures as people read them: a name in words and a value with its unit.

Every key that the code can put into a record of a decision or a change is in `NAMES`: a test walks over the sources.
A key may stand for a number in one record and for a name in another (`target`): the unit is for numbers alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from controller.wording.reasons import reason_in_words

DASH = "–"
MINUS = "−"
LEAST_S = 1e-6  # a shorter time reads as "less than": nobody reads more places
RAW_MOST = 300  # characters of a raw value on hover; all of it is in the record's JSON
# Units that are no noun: "s" seconds, "share" of one, "times" a ratio, "at" a moment, "word" a state, "code" a reason,
# "codes" counts by reason, "" a plain number or text. All others are said after the number, and are plural.
NAMES: dict[str, tuple[str, str]] = {
    # a request's way: targets, queue, dispatch
    "policy": ("policy", ""),
    "history": ("targets from", ""),
    "reference_ttft_s": ("first token measured on its level", "s"),
    "queue_correction_s": ("less by the queue's share", "s"),
    "waited_s": ("waited", "s"),
    "waiting_s": ("may wait", "s"),
    "starts_in_s": ("next instance in", "s"),
    "slack_s": ("left to its first-token time", "s"),
    "probability": ("chance to keep its targets", "share"),
    "token_budget": ("the engine's room", "tokens"),
    "waiting_tokens": ("prompts waiting there", "tokens"),
    "outstanding": ("already there", "requests"),
    "queued": ("queue", "requests"),
    "bound": ("the queue holds at most", "requests"),
    "hopeless": ("first-token time already lost", ""),
    "paused": ("held back by an operator", ""),
    "instances": ("instances", ""),
    "instance": ("instance", ""),
    "attempts": ("attempts", ""),
    "error": ("error", ""),
    "field": ("field at fault", ""),
    "decode_step_s": ("one decode step alone", "s"),
    "prefill_s": ("its prompt alone", "s"),
    "answer_s": ("the whole answer alone", "s"),
    "ttft_s": ("first token within", "s"),
    "tpot_s": ("then a token every", "s"),
    "deadline_s": ("whole answer within", "s"),
    "waiting_time_s": ("gives up waiting after", "s"),
    "ready_s": ("ready after", "s"),
    # its two stages, and the way of its KV cache
    "tokens": ("length", "tokens"),
    "source": ("source", ""),
    "pace_s": ("pace it has left, a token every", "s"),
    "decode_s": ("decode step there", "s"),
    "kv_tokens": ("KV cache", "tokens"),
    "failures": ("failures", ""),
    "attempt": ("attempt", ""),
    "outcome": ("outcome", "word"),
    "state": ("state", "word"),
    "after_s": ("after it was placed", "s"),
    "seconds": ("time", "s"),
    "measured_by": ("measured by", ""),
    "undo": ("undone because", "code"),
    "bytes": ("size", "bytes"),
    "early_bytes": ("sent while the prompt was computed", "bytes"),
    "layers": ("layers", ""),
    "cached": ("there already", "tokens"),
    "overlap_s": ("beside other work", "s"),
    # refusals, counted
    "requests": ("requests", ""),
    "commonest": ("most often", "code"),
    "by_code": ("by reason", "codes"),
    "by_class": ("by tenant and class", "requests"),
    # scaling
    "load": ("load", "times"),
    "utilisation": ("instances' mean load", "share"),
    "wait_over_slo": ("longest wait against its SLO", "times"),
    "arrival_rate": ("arriving", "requests/s"),
    "processing_rate": ("can be served", "requests/s"),
    "rate_ratio": ("arriving against what can be served", "times"),
    "ready": ("ready", "instances"),
    "starting": ("starting", "instances"),
    "draining": ("draining", "instances"),
    "snapshot_age_s": ("age of what it saw", "s"),
    "upper": ("scales out above a load of", "times"),
    "lower": ("scales in below a load of", "times"),
    "min_instances": ("fleet at least", "instances"),
    "max_instances": ("fleet at most", "instances"),
    "low_for_s": ("load was low for", "s"),
    "sustain_s": ("scales in after", "s"),
    "cooldown_s": ("pause after a change", "s"),
    "cooldown_left_s": ("pause left", "s"),
    "interval_s": ("looks every", "s"),
    "tick": ("look number", ""),
    "wanting_load": ("load of the stage that wants it", "times"),
    "from": ("from", ""),
    "seed": ("weights of", ""),
    "to": ("to", ""),
    "started": ("instances added", ""),
    "stopped": ("instances stopped", ""),
    "asleep": ("instances put to sleep", ""),
    "warm": ("warm", "instances"),
    "woken": ("woken", ""),
    "switched": ("taken from the other stage", ""),
    "wanted": ("wanted", "instances"),
    "reason": ("reason", "code"),
    # instances: start, drain, sleep, weights, links, roles
    "was": ("was", "word"),
    "url": ("address", ""),
    "since_wish_s": ("since it was asked for", "s"),
    "drained_for_s": ("drained for", "s"),
    "never_ready": ("in a row that never became ready", ""),
    "failures_5min": ("such failures in five minutes", ""),
    "pause_s": ("waits before it starts", "s"),
    "held": ("held because", "code"),
    "replacement": ("replaced by", ""),
    "level": ("sleep level", ""),
    "sleeps_at": ("asleep at level", ""),
    "aborted": ("cut off", "requests"),
    "asleep_s": ("asleep after", "s"),
    "awake_s": ("awake after", "s"),
    "load_s": ("weights moved in", "s"),
    "tried_s": ("all attempts together", "s"),
    "ordered_s": ("since it was ordered", "s"),
    "tries": ("times told", ""),
    "action": ("order number", ""),
    "scale_out": ("number of the scale-out", ""),
    "scale_in": ("number of the scale-in", ""),
    "first_served_s": ("first token after", "s"),
    "engines": ("other engines that have the weights", ""),
    "host_copy": ("a copy on its host", ""),
    "source_host": ("host of the source", ""),
    "source_utilisation": ("load of the source", "share"),
    "source_transfers": ("transfers there already", ""),
    "bandwidth_bytes_s": ("bandwidth", "bytes/s"),
    "sources": ("sources asked for", ""),
    "kind": ("kind", ""),
    "down_s": ("was down for", "s"),
    "target": ("target", "share"),
    "role": ("role", ""),
    "after": ("after", "code"),
    "before": ("older than", "at"),
    "switch_s": ("switched in", "s"),
    "safe_to_restore": ("serves in its old role", ""),
    # people: queue, access, experiments, traces, accounts
    "request_ids": ("requests meant", ""),
    "filter": ("filter", ""),
    "key": ("tenant and class", ""),
    "text": ("containing", ""),
    "until": ("arrived before", "at"),
    "matched": ("matched", "requests"),
    "priority": ("priority", ""),
    "applied": ("done", "requests"),
    "too_late": ("with an engine by then", "requests"),
    "gone": ("gone by then", ""),
    "unanswered": ("without an answer", "requests"),
    "told": ("gateways were told of", "requests"),
    "of": ("out of", "requests"),
    "ended": ("ended", "word"),
    "missing": ("gateways that did not say what waits there", ""),
    "gateways": ("gateways that answered", ""),
    "order": ("order", ""),
    "commands": ("commands", ""),
    "command": ("command", ""),
    "actor": ("by", ""),
    "method": ("method", ""),
    "needed": ("role needed", ""),
    "not_written_before": ("such refusals before it, not recorded one by one", ""),
    "days": ("kept for", "days"),
    "compares": ("compares", ""),
    "runs": ("runs", ""),
    "seeds": ("seeds", ""),
    "progress": ("progress", "share"),
    "span_s": ("lasts", "s"),
    "fields": ("fields changed", ""),
    "username": ("user name", ""),
    "is_active": ("may sign in", ""),
    "is_staff": ("may use the admin site", ""),
    "is_superuser": ("may do everything", ""),
    "roles": ("roles", ""),
    # what is configured, as a change of it is recorded
    "id": ("number", ""),
    "version": ("version", ""),
    "name": ("name", ""),
    "title": ("title", ""),
    "tenant": ("tenant", ""),
    "value": ("worth of an attained request", ""),
    "may_defer": ("may be deferred", ""),
    "levels": ("level", ""),
    "ttft_min_s": ("first token at least", "s"),
    "ttft_max_s": ("first token at most", "s"),
    "tpot_min_s": ("token every at least", "s"),
    "tpot_max_s": ("token every at most", "s"),
    "window": ("looks back on", "requests"),
    "window_age_s": ("none older than", "s"),
    "contention": ("least values", ""),
    "default_class": ("default class", ""),
    "default_of": ("was the default class of", ""),
    "rpm": ("requests a minute at most", "requests/min"),
    "tpm": ("tokens a minute at most", "tokens/min"),
    "max_concurrency": ("in flight at once", "requests"),
    "prefix": ("begins with", ""),
    "scopes": ("it may", ""),
    "successor": ("its successor begins with", ""),
    "expires_at": ("expires", "at"),
    "revoked_at": ("revoked", "at"),
    "last_used_at": ("last used", "at"),
    "model": ("model", ""),
    "aliases": ("other names", ""),
    "context_tokens": ("context", "tokens"),
    "chars_per_token": ("characters a token", ""),
    "tokenizer": ("tokenizer", ""),
    "device_kind": ("device", ""),
    "tp": ("devices together", ""),
    "coefficients": ("coefficients", ""),
    "fit_errors": ("error of the fit", "share"),
    "prefill_median_error": ("prefill, median", "share"),
    "prefill_p95_error": ("prefill, 95th percentile", "share"),
    "decode_median_error": ("decode, median", "share"),
    "decode_p95_error": ("decode, 95th percentile", "share"),
    "samples": ("samples", ""),
    "fitted_at": ("fitted", "at"),
    "active": ("in use", ""),
    "zone": ("zone", ""),
    "labels": ("labels", ""),
    "host": ("host", ""),
    "index": ("index on its host", ""),
    "memory_bytes": ("memory", "bytes"),
    "medium": ("medium", ""),
    "latency_s": ("latency", "s"),
    "backend": ("backend", ""),
    "provisioner": ("provisioner", ""),
    "max_num_seqs": ("runs at once", "requests"),
    "seqs_unsaid": ("how many at once, its server says", ""),
    "unit_cost": ("cost", "units/s"),
    "spec": ("how it is started", ""),
    "weights": ("weights", "word"),
    "sleep_level": ("sleep level", ""),
    "desired_state": ("wished", "word"),
    "observed_state": ("seen", "word"),
    "started_role": ("role at its start", ""),
    "generation": ("number of the wish", ""),
    "observed_generation": ("wish acted upon", ""),
    "desired_at": ("wished since", "at"),
    "observed_at": ("seen since", "at"),
    "ready_at": ("ready since", "at"),
    "stopped_at": ("stopped", "at"),
    "enabled": ("switched on", ""),
    "kept": ("kept", ""),
}

SOURCE = {"engine": "another engine's memory", "host": "the host's copy", "disk": "the disk"}  # of weights
# Values that are words of the code, by key.
VALUES: dict[str, dict[str, str]] = {
    "history": {"history": "what its level took lately", "no_history": "its level's first values: nothing is measured"},
    "contention": {
        "strict": "each level's own, always",
        "relax_to_next_higher": "those of the next more urgent level while nothing more urgent waits",
        "relax_to_zero": "none while nothing more urgent waits",
    },
    "ended": {"all": "all were told", "stopped": "stopped by its person", "redis_away": "Redis went away"},
    "kind": SOURCE,
    "source": SOURCE,
    "judged_by": {"tokens": "the times of its tokens", "e2e": "the time of the whole answer (not streamed)"},
    "field": {"target_ttft": "first token", "target_tbt": "time per token", "deadline": "deadline"},
}


# ---- names and values ------------------------------------------------------------------------------------------------


class Figure(NamedTuple):
    """`raw`: key and value as they are recorded."""

    name: str
    value: str
    raw: str

    @property
    def text(self) -> str:
        """`waited 1.2 s`, and with a colon before what is no number: `policy: baseline`."""
        number = self.value[:1].isdigit() or self.value[:1] in (MINUS, DASH)
        return f"{self.name}{' ' if number else ': '}{self.value}"


def named(key: str) -> str:
    """A key without an entry reads as its own words, so nothing is ever hidden."""
    return NAMES[key][0] if key in NAMES else key.replace("_", " ")


def figure(key: str, value: Any) -> Figure:
    recorded = value if isinstance(value, str) else json.dumps(value, default=str)
    return Figure(named(key), shown(key, value), f"{key}: {recorded}"[:RAW_MOST])


def line(values: Mapping[str, Any] | None) -> str:
    """On one line: `queue 4 requests · left to its first-token time 1.2 s`."""
    return " · ".join(figure(key, value).text for key, value in (values or {}).items())


def shown(key: str, value: Any, unit: str | None = None) -> str:
    """A value with its unit. `unit`: of what holds it, for keys that are no figures' (a tenant's name, an id)."""
    unit = NAMES[key][1] if key in NAMES else unit or ""
    if isinstance(value, Mapping):
        return ", ".join(_inner(name, each, unit) for name, each in value.items()) or "none"
    if isinstance(value, list | tuple):
        return _listed(key, value, unit)
    if unit == "at" and (at := moment(value)):
        return f"{at:%Y-%m-%d %H:%M:%S} UTC"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value, unit)
    return _word(key, value, unit)


def _word(key: str, value: Any, unit: str) -> str:
    if value is None or value == "":
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value)
    if text in VALUES.get(key, {}):
        return VALUES[key][text]
    return reason_in_words(text) if unit == "code" else text.replace("_", " ") if unit == "word" else text


def moment(value: Any) -> datetime | None:
    """From an ISO text or epoch seconds; None for anything else."""
    try:
        at = datetime.fromtimestamp(value, UTC) if isinstance(value, int | float) else datetime.fromisoformat(value)
        return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except (ValueError, TypeError, OverflowError, OSError):
        return None


def _inner(key: str, value: Any, unit: str) -> str:
    """One of a figure's own parts; names that are no keys of ours (ids, classes) stay as they are."""
    if unit == "codes":
        return f"{reason_in_words(key)}: {shown('', value)}"
    name = named(key) if key in NAMES else f"{key}:"
    text = shown(key, value, unit)
    return f"{name.rstrip(':')} ({text})" if isinstance(value, Mapping | list | tuple) else f"{name} {text}"


def _listed(key: str, values: list[Any] | tuple[Any, ...], unit: str) -> str:
    """Of objects each stands in brackets. A priority mapping's levels are numbered from 0."""
    if not values:
        return "none"
    if not all(isinstance(each, Mapping) for each in values):
        return ", ".join(shown(key, each, unit) for each in values)
    words = (f"({', '.join(_inner(name, part, '') for name, part in each.items())})" for each in values)
    return ", ".join(f"{number} {each}" for number, each in enumerate(words))


# ---- numbers with their units ----------------------------------------------------------------------------------------


def number(value: float, unit: str) -> str:
    """Four digits are shown; a time below a second in ms. "1 request", "2 requests"."""
    sign, size = (MINUS if value < 0 else ""), abs(value)
    if unit == "s":
        return f"{sign}{_digits(size * 1000)} ms" if 0 < size < 0.99995 else f"{sign}{_digits(size)} s"
    if unit == "share":
        return f"{sign}{_digits(size * 100)} %"
    if unit == "times":
        return f"{sign}{size:.3g}×"
    if unit in ("bytes", "bytes/s"):
        return sign + _bytes(size, unit.removeprefix("bytes"))
    if not unit:  # an order's number is no amount: no separators
        return f"{sign}{size:.4g}" if isinstance(size, float) else f"{sign}{size}"
    noun, slash, per = unit.partition("/")
    return f"{sign}{_digits(size)} {noun.removesuffix('s') if size == 1 else noun}{slash}{per}"


def _digits(size: float) -> str:
    if isinstance(size, int) or size >= 1000:
        return f"{size:,.0f}"
    return f"{size:.4g}"


def _bytes(size: float, per: str) -> str:
    """Decimal, as networks count."""
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.9995 * step:  # else three digits of the smaller unit would be 1e+03
            return f"{size / step:.3g} {unit}{per}"
    return f"{size:.3g} B{per}"


def ms(seconds: float | Literal[""] | None) -> str:
    """Seconds as ms below one second, as s below two minutes, as min above."""
    if seconds is None or seconds == "":
        return DASH
    sign, size = (MINUS if seconds < 0 else ""), abs(seconds)
    if size < 0.01:
        return f"{sign}{size * 1000:.1f} ms"
    if size < 0.9995:
        return f"{sign}{size * 1000:.0f} ms"
    if size < 10:
        return f"{sign}{size:.2f} s"
    return f"{sign}{size:.1f} s" if size < 120 else f"{sign}{size / 60:.0f} min"


def count(value: float | Literal[""] | None) -> str:
    return DASH if value is None or value == "" else f"{value:,.0f}"


def took(seconds: float) -> str:
    """With its unit, rounded for reading, never with an exponent."""
    if 0 < seconds < LEAST_S * (1 - 1e-9):
        return f"less than {took(LEAST_S)}"
    size, unit = (seconds * 1000, "ms") if seconds < 0.9995 else (seconds, "s")
    places = 0 if size >= 99.95 or (unit == "ms" and size >= 9.95) else _places(size, unit)
    text = f"{size:,.{places}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {unit}"


def _places(size: float, unit: str) -> int:
    if unit == "s":
        return 1 if size >= 9.995 else 2
    return 1 if size >= 0.95 else 3
