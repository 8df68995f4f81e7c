"""What a record holds, in words: keys of figures with their units, and reason codes. Values are in `values.py`.

Tests search the sources for keys and codes that have no words here; such a one reads as its own words. A key may stand
for a number in one record and for a name in another (`target`): its unit is for numbers alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from controller.wording.configured import CONFIGURED
from controller.wording.measures import DASH, MINUS, number
from controller.wording.values import VALUES

RAW_MOST = 300  # characters of a raw value on hover; all of it is in the record's JSON

# ---- keys of figures ------------------------------------------------------------------------------------------------

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
    "instance_starting": ("an instance was starting", ""),
    "slack_s": ("time left to its TTFT target", "s"),
    "goodput_rate": ("goodput for each second of its time", "tokens"),
    "frame": ("frame", ""),
    "cutoff": ("cutoff", ""),
    "probability": ("probability of meeting its targets", "share"),
    "token_budget": ("token budget of the instance", "tokens"),
    "waiting_tokens": ("prompts waiting at the instance", "tokens"),
    "outstanding": ("outstanding at the instance", "requests"),
    "queued": ("queue", "requests"),
    "bound": ("queue limit", "requests"),
    "pruned": ("pruned", ""),
    "behind_s": ("its batch would be late by", "s"),
    "hopeless": ("TTFT target already missed", ""),
    "returned": ("no longer pruned", "requests"),
    "left": ("sent, ended or too late", "requests"),
    "left_s": ("time left in the workflow", "s"),
    "thinking_deadline_s": ("thinking deadline", "s"),
    "workflow_deadline_s": ("workflow's deadline", "s"),
    "thinking_s": ("time that its reasoning may take", "s"),
    "running": ("running", "requests"),
    "workflows": ("workflows", ""),
    "steps_left": ("steps left in the workflow", ""),
    "step_s": ("share of this request", "s"),
    "shared_by": ("share based on", ""),
    "graph_version": ("version of the pattern graphs", ""),
    "similarity": ("similarity to the matched workflow", "share"),
    "sharing": ("equal requests that got its answer too", "requests"),
    "fork_s": ("cost from its checkpoint", "s"),
    "again_s": ("cost without it", "s"),
    "age_s": ("age of the answer", "s"),
    "of_request": ("request whose answer it got", ""),
    "most_waiting": ("most requests that waited", "requests"),
    "by_instance": ("by instance", ""),
    "longest_behind_s": ("largest lateness of a batch", "s"),
    "paused": ("paused by an operator", ""),
    "instances": ("instances", ""),
    "instance": ("instance", ""),
    "attempts": ("attempts", ""),
    "died": ("engines that died", ""),
    "quarantine_s": ("the same request is refused for", "s"),
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
    "decode_s": ("decode step on the instance", "s"),
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
    "flow": ("scheduling on the shared link", "word"),
    "held_s": ("held for more urgent transfers", "s"),
    "flow_level": ("level on the shared link", ""),
    "promotions": ("promotions on the shared link", ""),
    "requests": ("requests", ""),
    "commonest": ("most common reason", "code"),
    "by_code": ("by reason", "codes"),
    "refused_requests": ("of them refused", "requests"),
    "by_class": ("by tenant and class", "requests"),
    # scaling
    "load": ("load", "share"),
    "utilisation": ("mean instance utilisation", "share"),
    "wait_over_slo": ("longest wait relative to its target", "share"),
    "arrival_rate": ("arrival rate", "requests/s"),
    "processing_rate": ("service rate", "requests/s"),
    "rate_ratio": ("arrival rate relative to service rate", "share"),
    "ready": ("ready", "instances"),
    "starting": ("starting", "instances"),
    "draining": ("draining", "instances"),
    "snapshot_age_s": ("telemetry age", "s"),
    "upper": ("upper threshold", "share"),
    "lower": ("lower threshold", "share"),
    "min_instances": ("minimum", "instances"),
    "max_instances": ("maximum", "instances"),
    "low_for_s": ("load was low for", "s"),
    "start_s": ("start of an instance takes", "s"),
    "sustain_s": ("scales in after low load for", "s"),
    "cooldown_s": ("cooldown", "s"),
    "cooldown_left_s": ("cooldown left", "s"),
    "interval_s": ("evaluated every", "s"),
    "tick": ("evaluation", ""),
    "wanting_load": ("load of the stage that needs it", "share"),
    "from": ("from", ""),
    "seed": ("weights from", ""),
    "to": ("to", ""),
    "started": ("instances started", ""),
    "stopped": ("instances stopped", ""),
    "asleep": ("instances put to sleep", ""),
    "warm": ("warm", "instances"),
    "woken": ("instances woken", ""),
    "like": ("with the settings of", ""),
    "switched": ("switched from the other stage", ""),
    "wanted": ("wanted", "instances"),
    "reason": ("reason", "code"),
    # instances: start, drain, sleep, weights, links, roles
    "was": ("was", "word"),
    "url": ("address", ""),
    "since_desired_s": ("time since the request", "s"),
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
    "ordered_s": ("time since it was requested", "s"),
    "tries": ("times requested", ""),
    "action": ("action number", ""),
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
    "names": ("names of what it refers to", ""),
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
    "by": ("limit reached for", ""),
    "address": ("client address", ""),
    "account": ("service account", ""),
    "addresses": ("client addresses", ""),
    "sessions": ("sessions", ""),
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
    **CONFIGURED,
}


# ---- reason codes ---------------------------------------------------------------------------------------------------

# Causes of a miss, as the gateway records them, and reasons of dispatcher, scaler and people.
REASONS: dict[str, str] = {
    # misses (gateway)
    "queued_too_long": "waited in the queue past its TTFT target",
    "slow_first_token": "the engine's first token was late",
    "slow_thinking": "the first token of the answer came after the thinking deadline",
    "slow_decode": "decoding was slower than the TPOT target",
    "deadline_missed": "the answer finished after its deadline",
    "e2e_missed": "the whole answer took too long (not streamed)",
    "engine_cut": "the engine failed during the answer",
    "shutting_down": "the gateway shut down before the answer was complete",
    "engine_failed": "the engine failed and the request could not be retried",
    "ended_engines": "engines died while they computed it",
    "quarantined": "refused: engines died when it was sent before",
    # refusals and drops (dispatcher, gateway)
    "slo_infeasible": "refused: no instance could meet its targets",
    "infeasible_alone": "refused: its targets cannot be met even on an idle instance",
    "unattainable_in_queue": "refused: its targets cannot be met behind the requests ahead of it",
    "no_capacity": "refused: no instance was up",
    "no_instance": "refused: no instance was up or starting",
    "starts_too_late": "refused: no instance was up, and the next one would start after its waiting time",
    "rate_limit_exceeded": "refused: the tenant's quota was exceeded",
    "queue_full": "refused: the queue was full",
    "waiting_time_exceeded": "timed out in the queue",
    "waiting_time": "timed out in the queue",
    "expired": "timed out in the queue",
    "expired_hopeless": "timed out in the queue after its TTFT target had passed",
    "expired_pruned": "timed out in the queue while it was served last, so that other requests were in time",
    "expired_paused": "timed out in the queue while an operator had paused it",
    "expired_without_instance": "timed out in the queue while no instance was up",
    "cancelled": "cancelled at the engine by the dispatcher",
    "cancelled_by_operator": "cancelled in the queue by an operator",
    "workflow_cancelled": "its client cancelled the workflow",
    "workflow_cancelled_by_operator": "an operator cancelled its workflow",
    "internal_error": "the gateway could not schedule it because of an internal error",
    "no_time_to_retry": "its engine failed, and too little waiting time was left for a retry",
    # dispatches
    "fits_budget": "fits within the instance's token budget",
    "waited_for_tpot": "sent after a wait that spares TPOT targets, its own or those of other answers",
    "goodput_window": "of similar prompt length as the others that are worth most for their time on this instance",
    "goodput_first": "worth most for its time on this instance, of the requests that it had room for",
    "late_everywhere": "too late to meet its targets on any instance, and no other request was ahead of it",
    "hopeless_spare_budget": "too late to meet its targets, so it was served from spare capacity",
    "pruned_spare_budget": "pruned, so it was served from spare capacity",
    "prefilled": "its prefill finished",
    "others_in_time": "served last, so that other requests are in time",
    "room_again": "there is capacity for it again",
    "orders_expired": "the orders of the coordinator expired",
    "orders_over": "no pruned request is waiting any longer",
    "workflow_began": "it began the workflow",
    "workflow_inherited": "its share of the time left in the workflow",
    "workflow_late": "the workflow is late, so the request is served by its own targets",
    "workflow_not_named": "it stands for refusals of several workflows, and counts for none of them",
    "workflow_alone": "other requests of the workflow are not known, so the deadline counts from this one",
    "shared_call": "an equal request was being served, and this one got its answer",
    "from_checkpoint": "it went on from the KV of the step that it branches from",
    "sooner_again": "another instance was expected to compute all of it at less cost",
    "checkpoint_lost": "the KV of the step that it branches from was not there any more",
    "stored_step": "its step had an answer, which was kept",
    "call_shared": "equal requests got its answer too",
    # where a decode stage goes; whether it was placed, prefilled again or given up says what stands beside it
    "fits_tpot": "fits within the instance's TPOT budget",
    "hopeless_harmless": "too late to meet its targets, so it was placed where it slows no other request",
    "waits_for_slot": "all slots are taken, and its answer has the time to wait there for one; it was first in "
    "line, or its first token was due",
    "held_too_long": "waited too long for a better instance",
    "least_outstanding": "the instance with the fewest outstanding requests",
    "round_robin": "the next instance in round-robin order",
    "one_shot": "the instance that was chosen when its prompt was dispatched",
    "no_decode_instance": "no decode instance was up",
    "links_down": "every link from its prefill instance was down",
    "prefilling_timeout": "its prefill timed out",
    "waiting_timeout": "no decode instance had room for it in time",
    "migrator_failed": "internal error in the migrator",
    # KV transfers between two instances
    "kv_landed": "its KV cache arrived at the decode instance",
    "prefix_copied": "the other instance had computed the beginning of its prompt",
    "kv_lost": "its KV cache was lost",
    "other_model": "its KV cache has a different model or layout",
    "no_room": "the decode instance had no room for its KV cache",
    "unreachable": "the other instance could not be reached",
    "transfer_failed": "the KV transfer failed",
    "placed_timeout": "the decode instance did not respond in time",
    "reserved_timeout": "the decode instance reserved room but did not fetch the KV cache in time",
    "moving_timeout": "the KV transfer timed out",
    "link_down": "the link between the two instances was down",
    "answers_again": "it responds again",
    "left_to_lease": "the prefill instance did not confirm that it freed the KV cache, so its lease will free it",
    "cut": "the transfer was interrupted",
    "corrupt": "the data that arrived was corrupt",
    "request_ended": "the request ended first",
    "undone": "the transfer was rolled back before it finished",
    "decode_failed": "the decode instance failed",
    "prefill_failed": "the prefill instance failed, so both stages start over",
    "refused": "the decode instance refused it",
    # jobs
    "load_above_upper": "load is above the upper threshold",
    "load_below_lower": "load is below the lower threshold",
    "telemetry_stale": "the telemetry is stale",
    "below_min": "fewer instances than the policy's minimum",
    "above_max": "more instances than the policy's maximum",
    "at_max": "the policy's maximum is reached",
    "settling": "the last change has not settled yet",
    "relieved": "load is between the thresholds again",
    "rest_would_exceed_upper": "with one instance fewer, load would exceed the upper threshold or 100 %",
    "needed_for_targets": (
        "each instance that could be stopped is the only one that can meet the targets of some recent request"
    ),
    "needed_asleep": "only an instance that was asleep can meet the targets of some recent request",
    "needed_draining": "only an instance that was draining can meet the targets of some recent request",
    "needed_stopped": "only an instance like one that was stopped can meet the targets of some recent request",
    "template_paused": "its launch template is paused, since starts from it failed",
    "starts_failed": "instances in a row that were started from it never became ready",
    "nothing_to_start": "there is no managed instance to start a copy of",
    "no_device": "no device is free for another instance",
    "nothing_to_stop": "every instance is managed externally",
    "pool_below_target": "the warm pool has fewer spares than the policy requires",
    "pool_above_target": "the warm pool has more spares than the policy requires",
    "starting": "its process was started",
    "waits": "it is waiting for capacity to start",
    "healthy": "it responds to health checks",
    "failed_checks": "it is running but fails its health checks",
    "out_of_sight": "its provisioner cannot tell whether its engine still runs",
    "new_run": "it restarted",
    "again": "it had been ready before",
    "no_answer": "it does not respond",
    "exited": "its process exited",
    "start_timeout": "it was not ready in time",
    "settings_refused": "the engine does not start with its settings",
    "never_ready": "its replacements did not become ready either",
    "drained": "it finished its requests",
    "drain_timeout": "it was still busy when its drain timed out",
    "ended_while_draining": "it exited while it was draining",
    "stopped": "it was stopped",
    "switched": "the engine switched to the role",
    "not_prepared": "the engine failed its dry run of the role change",
    "unsafe_to_restore": "the engine cannot return to its old role either",
    "not_enabled": "the engine was started without the option to change its role",
    "no_such_switch": "the engine can only switch between prefill and decode",
    "transfer_backend": "the engine's KV transfer backend cannot switch between prefill and decode",
    "connection_lost": "the connection to the engine was lost during the switch",
    "no_effect": "repeated requests to the engine had no effect",
    "not_supported": "the engine does not support it, or was started without it",
    "timeout": "it timed out",
    "person_asked": "requested by a person",
    "present_already": "the weights were already loaded",
    "from_engine": "its weights were loaded from another engine's memory",
    "from_host": "its weights were loaded from the copy in host memory",
    "from_disk": "its weights were loaded from disk",
    "same_host": "an engine on the same host has the weights",
    "widest_link": "it has the fastest link of the engines that have the weights",
    "link_unknown": "an engine has the weights, but nothing is known about the link to it",
    "host_copy": "its host keeps a copy of the weights in memory",
    "disk_only": "no reachable engine has the weights, and its host keeps no copy",
    "no_source": "no source provided complete weights",
    "engine_refused": "the engine refused the action",
    "engine_forgot": "the engine restarted repeatedly and lost the action",
    "instance_not_wanted": "the instance was no longer needed",
    "started": "cold start: a new process was started for it",
    "warm": "a warm spare loaded its weights for it",
    "woken": "a sleeping instance was woken for it",
    "seeded": "its weights are loaded from the memory of a serving instance",
    "launched": "an operator launched the server with that command",
    "never_served": "it never received a request",
    "stopped_before": "it was stopped before it served a request",
    "never_woke": "its weights were not loaded, or it did not wake",
    "slept_before": "it was put to sleep before it served a request",
    "level_1": "sleep level 1: a copy of the weights stays in host memory",
    "level_2": "sleep level 2: no copy of the weights is kept",
    "no_sleep_mode": "the server does not support sleep",
    "stays_awake": "the engine was ordered to sleep and is still awake",
    "stays_asleep": "the engine was ordered to wake up and is still asleep",
    "asleep_otherwise": "the engine is already asleep at a different level",
    "found_awake": "it was found awake although no wake-up was requested",
    "not_ready": "the engine stopped being ready for another reason than sleep",
    "memory_unknown": "it is unknown whether the engine released or restored its memory: restart it",
    "reload_failed": "the engine could not reload its weights",
    "reload_lost": "the engine became unreachable while it reloaded its weights",
    "demand_diverged": "one stage is overloaded and the other has spare capacity",
    "role_too_low": "the role does not allow it",
    "csrf_failed": "the form failed its CSRF check",
    "not_signed_in": "nobody was signed in",
    "too_many_sign_ins": "too many failed attempts to sign in",
    "invalid_api_key": "the API key or token is unknown, expired or revoked",
    "scope_missing": "the API key or service account lacks the scope",
    "keys_change_nothing": "a tenant's API key cannot make changes",
    "no_room_for_records": "PostgreSQL did not take the records, and their buffer was full",
    "older_than_kept": "older than the retention period",
}


# Where a request's targets came from.
SOURCES: dict[str, str] = {
    "explicit": "set in the request",
    "class": "from its SLO class",
    "priority": "mapped from its priority",
    "tenant_default": "from its tenant's default class",
    "defaults": "system defaults",
}


def reason_in_words(code: str) -> str:
    return REASONS.get(code) or code.replace("_", " ")


def class_name(slo_class: str) -> str:
    """Requests without a class are served on the defaults; that, too, is a row."""
    return slo_class or "no class (defaults)"


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


RENAMED = {"since_wish_s": "since_desired_s"}  # keys of stored decisions that have another name now


def named(key: str) -> str:
    """A key without an entry reads as its own words, so nothing is ever hidden."""
    key = RENAMED.get(key, key)
    return NAMES[key][0] if key in NAMES else key.replace("_", " ")


def figure(key: str, value: Any) -> Figure:
    recorded = value if isinstance(value, str) else json.dumps(value, default=str)
    return Figure(named(key), shown(key, value), f"{key}: {recorded}"[:RAW_MOST])


def ruled_out(why: Any) -> str:
    """Why an alternative was not chosen: figures, a number of outstanding requests, or a reason (a text if old)."""
    if isinstance(why, Mapping):
        counts = (f"{count} {COUNTED.get(key, named(key))}" for key, count in why.items())
        return ", ".join(counts)
    return shown("outstanding", why) if isinstance(why, int | float) else reason_in_words(str(why))


COUNTED = {"outstanding": "outstanding", "waiting_tokens": "tokens waiting"}


def line(values: Mapping[str, Any] | None) -> str:
    """On one line: `queue 4 requests · left to its first-token time 1.2 s`."""
    return " · ".join(figure(key, value).text for key, value in (values or {}).items())


def shown(key: str, value: Any, unit: str | None = None) -> str:
    """A value with its unit. `unit`: of what holds it, for keys that are no figures' (a tenant's name, an id)."""
    key = RENAMED.get(key, key)
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
