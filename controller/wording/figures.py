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
    "history": ("source of targets", ""),
    "reference_ttft_s": ("TTFT measured for its level", "s"),
    "queue_correction_s": ("queue correction", "s"),
    "waited_s": ("waited", "s"),
    "waiting_s": ("waiting time", "s"),
    "starts_in_s": ("next instance starts in", "s"),
    "slack_s": ("time left to its TTFT target", "s"),
    "probability": ("probability of meeting its targets", "share"),
    "token_budget": ("token budget of the instance", "tokens"),
    "waiting_tokens": ("prompts waiting there", "tokens"),
    "outstanding": ("outstanding there", "requests"),
    "queued": ("queue", "requests"),
    "bound": ("queue limit", "requests"),
    "hopeless": ("TTFT target already missed", ""),
    "paused": ("paused by an operator", ""),
    "instances": ("instances", ""),
    "instance": ("instance", ""),
    "attempts": ("attempts", ""),
    "error": ("error", ""),
    "field": ("field", ""),
    "decode_step_s": ("decode step on an idle instance", "s"),
    "prefill_s": ("prefill on an idle instance", "s"),
    "answer_s": ("whole answer on an idle instance", "s"),
    "ttft_s": ("TTFT target", "s"),
    "tpot_s": ("TPOT target", "s"),
    "deadline_s": ("deadline", "s"),
    "waiting_time_s": ("waiting time", "s"),
    "ready_s": ("ready after", "s"),
    # its two stages, and the way of its KV cache
    "tokens": ("length", "tokens"),
    "source": ("source", ""),
    "pace_s": ("TPOT budget left", "s"),
    "decode_s": ("decode step there", "s"),
    "kv_tokens": ("KV cache", "tokens"),
    "failures": ("failures", ""),
    "attempt": ("attempt", ""),
    "outcome": ("outcome", "word"),
    "state": ("state", "word"),
    "after_s": ("time since placement", "s"),
    "seconds": ("duration", "s"),
    "measured_by": ("measured by", ""),
    "undo": ("rolled back because", "code"),
    "bytes": ("size", "bytes"),
    "early_bytes": ("sent during prefill", "bytes"),
    "layers": ("layers", ""),
    "cached": ("already cached", "tokens"),
    "overlap_s": ("overlapped with other work", "s"),
    # refusals, counted
    "requests": ("requests", ""),
    "commonest": ("most common reason", "code"),
    "by_code": ("by reason", "codes"),
    "by_class": ("by tenant and class", "requests"),
    # scaling
    "load": ("load", "times"),
    "utilisation": ("mean instance utilisation", "share"),
    "wait_over_slo": ("longest wait relative to its target", "times"),
    "arrival_rate": ("arrival rate", "requests/s"),
    "processing_rate": ("service rate", "requests/s"),
    "rate_ratio": ("arrival rate relative to service rate", "times"),
    "ready": ("ready", "instances"),
    "starting": ("starting", "instances"),
    "draining": ("draining", "instances"),
    "snapshot_age_s": ("telemetry age", "s"),
    "upper": ("upper threshold", "times"),
    "lower": ("lower threshold", "times"),
    "min_instances": ("minimum", "instances"),
    "max_instances": ("maximum", "instances"),
    "low_for_s": ("load was low for", "s"),
    "sustain_s": ("scales in after low load for", "s"),
    "cooldown_s": ("cooldown", "s"),
    "cooldown_left_s": ("cooldown left", "s"),
    "interval_s": ("evaluated every", "s"),
    "tick": ("evaluation", ""),
    "wanting_load": ("load of the stage that needs it", "times"),
    "from": ("from", ""),
    "seed": ("weights from", ""),
    "to": ("to", ""),
    "started": ("instances started", ""),
    "stopped": ("instances stopped", ""),
    "asleep": ("instances put to sleep", ""),
    "warm": ("warm", "instances"),
    "woken": ("instances woken", ""),
    "switched": ("switched from the other stage", ""),
    "wanted": ("wanted", "instances"),
    "reason": ("reason", "code"),
    # instances: start, drain, sleep, weights, links, roles
    "was": ("was", "word"),
    "url": ("address", ""),
    "since_wish_s": ("time since the request", "s"),
    "drained_for_s": ("drained for", "s"),
    "never_ready": ("consecutive starts that never became ready", ""),
    "failures_5min": ("failures in the last 5 min", ""),
    "pause_s": ("backoff", "s"),
    "held": ("held because", "code"),
    "replacement": ("replaced by", ""),
    "level": ("sleep level", ""),
    "sleeps_at": ("asleep at level", ""),
    "aborted": ("aborted", "requests"),
    "asleep_s": ("asleep after", "s"),
    "awake_s": ("awake after", "s"),
    "load_s": ("weights loaded in", "s"),
    "tried_s": ("time for all attempts", "s"),
    "ordered_s": ("time since the order", "s"),
    "tries": ("times ordered", ""),
    "action": ("order number", ""),
    "scale_out": ("scale-out decision", ""),
    "scale_in": ("scale-in decision", ""),
    "first_served_s": ("first token after", "s"),
    "engines": ("other engines with the weights", ""),
    "host_copy": ("copy in host memory", ""),
    "source_host": ("source host", ""),
    "source_utilisation": ("source utilisation", "share"),
    "source_transfers": ("transfers already at the source", ""),
    "bandwidth_bytes_s": ("bandwidth", "bytes/s"),
    "sources": ("requested sources", ""),
    "kind": ("kind", ""),
    "down_s": ("down for", "s"),
    "target": ("target", "share"),
    "role": ("role", ""),
    "after": ("after", "code"),
    "before": ("older than", "at"),
    "switch_s": ("switched in", "s"),
    "safe_to_restore": ("can return to its old role", ""),
    # people: queue, access, experiments, traces, accounts
    "request_ids": ("requests", ""),
    "filter": ("filter", ""),
    "key": ("tenant and class", ""),
    "text": ("containing", ""),
    "until": ("arrived before", "at"),
    "matched": ("matched", "requests"),
    "priority": ("priority", ""),
    "applied": ("applied to", "requests"),
    "too_late": ("already with an engine", "requests"),
    "gone": ("no longer there", ""),
    "unanswered": ("not acknowledged", "requests"),
    "told": ("sent to gateways", "requests"),
    "of": ("out of", "requests"),
    "ended": ("ended", "word"),
    "missing": ("gateways that did not report their queue", ""),
    "gateways": ("gateways that responded", ""),
    "order": ("order", ""),
    "commands": ("commands", ""),
    "command": ("command", ""),
    "actor": ("by", ""),
    "method": ("method", ""),
    "needed": ("role required", ""),
    "not_written_before": ("earlier refusals not recorded individually", ""),
    "days": ("retention", "days"),
    "compares": ("comparison", ""),
    "runs": ("runs", ""),
    "seeds": ("seeds", ""),
    "progress": ("progress", "share"),
    "span_s": ("duration", "s"),
    "fields": ("changed fields", ""),
    "username": ("user name", ""),
    "is_active": ("can sign in", ""),
    "is_staff": ("can use the admin site", ""),
    "is_superuser": ("superuser", ""),
    "roles": ("roles", ""),
    # what is configured, as a change of it is recorded
    "id": ("number", ""),
    "version": ("version", ""),
    "name": ("name", ""),
    "title": ("title", ""),
    "tenant": ("tenant", ""),
    "value": ("value of an attained request", ""),
    "may_defer": ("can be deferred", ""),
    "levels": ("level", ""),
    "ttft_min_s": ("minimum TTFT", "s"),
    "ttft_max_s": ("maximum TTFT", "s"),
    "tpot_min_s": ("minimum TPOT", "s"),
    "tpot_max_s": ("maximum TPOT", "s"),
    "window": ("sample window", "requests"),
    "window_age_s": ("maximum sample age", "s"),
    "contention": ("minimums under contention", ""),
    "default_class": ("default class", ""),
    "default_of": ("was the default class of", ""),
    "rpm": ("request limit", "requests/min"),
    "tpm": ("token limit", "tokens/min"),
    "max_concurrency": ("concurrency limit", "requests"),
    "prefix": ("prefix", ""),
    "scopes": ("scopes", ""),
    "successor": ("successor's prefix", ""),
    "expires_at": ("expires", "at"),
    "revoked_at": ("revoked", "at"),
    "last_used_at": ("last used", "at"),
    "model": ("model", ""),
    "aliases": ("aliases", ""),
    "context_tokens": ("context length", "tokens"),
    "chars_per_token": ("characters per token", ""),
    "tokenizer": ("tokenizer", ""),
    "device_kind": ("device", ""),
    "tp": ("tensor parallelism", ""),
    "coefficients": ("coefficients", ""),
    "fit_errors": ("fit error", "share"),
    "prefill_median_error": ("median prefill error", "share"),
    "prefill_p95_error": ("95th percentile prefill error", "share"),
    "decode_median_error": ("median decode error", "share"),
    "decode_p95_error": ("95th percentile decode error", "share"),
    "samples": ("samples", ""),
    "fitted_at": ("fitted", "at"),
    "active": ("active", ""),
    "zone": ("zone", ""),
    "labels": ("labels", ""),
    "host": ("host", ""),
    "index": ("index on its host", ""),
    "memory_bytes": ("memory", "bytes"),
    "medium": ("medium", ""),
    "latency_s": ("latency", "s"),
    "backend": ("backend", ""),
    "provisioner": ("provisioner", ""),
    "max_num_seqs": ("maximum running requests", "requests"),
    "seqs_unsaid": ("maximum running requests not specified", ""),
    "unit_cost": ("cost", "units/s"),
    "spec": ("start settings", ""),
    "weights": ("weights", "word"),
    "sleep_level": ("sleep level", ""),
    "desired_state": ("desired state", "word"),
    "observed_state": ("observed state", "word"),
    "started_role": ("role at start", ""),
    "generation": ("desired generation", ""),
    "observed_generation": ("observed generation", ""),
    "desired_at": ("desired since", "at"),
    "observed_at": ("observed since", "at"),
    "ready_at": ("ready since", "at"),
    "stopped_at": ("stopped", "at"),
    "enabled": ("enabled", ""),
    "kept": ("retained", ""),
}

SOURCE = {"engine": "another engine's memory", "host": "host memory", "disk": "disk"}  # of weights
# Values that are words of the code, by key.
VALUES: dict[str, dict[str, str]] = {
    "history": {
        "history": "recent measurements of its level",
        "no_history": "initial values of its level (no measurements)",
    },
    "contention": {
        "strict": "always those of each level",
        "relax_to_next_higher": "those of the next more urgent level while no more urgent request is waiting",
        "relax_to_zero": "none while no more urgent request is waiting",
    },
    "ended": {"all": "sent for all", "stopped": "stopped by the operator", "redis_away": "Redis became unavailable"},
    "kind": SOURCE,
    "source": SOURCE,
    "judged_by": {"tokens": "token times", "e2e": "end-to-end time (not streamed)"},
    "field": {"target_ttft": "TTFT target", "target_tbt": "TPOT target", "deadline": "deadline"},
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
