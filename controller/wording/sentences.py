"""Decisions as sentences: who did what to whom, and why, with the figures that matter. The rest is in the audit."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from string import Formatter
from typing import Any, Protocol

from controller.core.decisions import DecisionMessage
from controller.core.load import FULL
from controller.wording.changes import changes
from controller.wording.vocabulary import RENAMED, line, reason_in_words

# Whole sentences for what happens often; the figures are those that the decision was based on.
SENTENCES: dict[tuple[str, str], str] = {
    # the scaler
    ("scale_out", "load_above_upper"): (
        "{actor} scaled out {subject}: load {load:,.0f} % is above {upper:g} % with {ready} ready"
    ),
    ("scale_out", "below_min"): "{actor} scaled out {subject}: {ready} ready, the minimum is {min_instances}",
    ("scale_out", "needed_asleep"): (
        "{actor} scaled out {subject} at load {load:.0f} %: a recent request has targets that only an instance that "
        "was asleep can meet"
    ),
    ("scale_out", "needed_draining"): (
        "{actor} took back the drain of {instance} at load {load:.0f} %: a recent request has targets that no other "
        "instance of {subject} can meet"
    ),
    ("scale_out", "needed_stopped"): (
        "{actor} scaled out {subject} at load {load:.0f} %: a recent request has targets that only an instance that "
        "was stopped could meet, so it started one like it"
    ),
    ("scale_in", "load_below_lower"): (
        "{actor} scaled in {subject}: load {load:,.0f} % was below {lower:g} % for {low_for_s:.0f} s, so it removed "
        "{instance}"
    ),
    ("scale_in", "above_max"): "{actor} scaled in {subject}: {ready} ready, the maximum is {max_instances}",
    ("scale_hold", "relieved"): "{actor} left {subject} unchanged: load {load:,.0f} % is no longer above {upper:g} %",
    ("scale_hold", "settling"): (
        "{actor} is waiting to scale {subject}: load {load:,.0f} %, but the last change has not settled yet"
    ),
    ("scale_hold", "at_max"): (
        "{actor} cannot scale out {subject}: load {load:,.0f} %, but the maximum of {max_instances} is reached"
    ),
    ("scale_hold", "no_device"): "{actor} cannot scale out {subject}: load {load:,.0f} %, but no device is free",
    ("scale_hold", "telemetry_stale"): "{actor} left {subject} unchanged: its telemetry is {snapshot_age_s:.1f} s old",
    ("scale_hold", "nothing_to_start"): (
        "{actor} cannot scale out {subject}: load {load:,.0f} %, but there is no managed instance to start a copy of"
    ),
    ("scale_hold", "template_paused"): (
        "{actor} cannot scale out {subject}: load {load:,.0f} %, but the launch template of its instances is paused, "
        "since starts from it failed"
    ),
    ("scale_hold", "nothing_to_stop"): (
        "{actor} cannot scale in {subject}: {ready} ready, the maximum is {max_instances}, but every instance is "
        "managed externally"
    ),
    ("scale_hold", "rest_would_exceed_upper"): (
        "{actor} keeps every instance of {subject} at load {load:,.0f} %: with one fewer, the arriving requests would "
        "exceed a load of {rest:g} %"
    ),
    ("scale_hold", "needed_for_targets"): (
        "{actor} keeps every instance of {subject} at load {load:,.0f} %: each one that could be stopped is the only "
        "one that can meet the targets of some recent request"
    ),
    ("scale_warm", "pool_below_target"): (
        "{actor} is adding warm spares for {subject}: {warm} in the pool, {wanted} required"
    ),
    ("scale_warm", "pool_above_target"): (
        "{actor} is removing warm spares of {subject}: {warm} in the pool, {wanted} required"
    ),
    ("role_change", "demand_diverged"): (
        "{actor} switches {instance} from {from} to {to}, because {subject} has spare capacity"
    ),
    # what came of a scale-out or of a launch command
    ("scale_out_served", "warm"): (
        "{instance} of {subject}: first token {first_served_s:.1f} s after the request to start (warm spare, weights "
        "from {source} in {load_s:.1f} s)"
    ),
    ("scale_out_served", "started"): (
        "{instance} of {subject}: first token {first_served_s:.1f} s after the request to start (cold start)"
    ),
    ("scale_out_served", "woken"): (
        "{instance} of {subject}: first token {first_served_s:.1f} s after the request to start (woken from sleep, "
        "weights from {source} in {load_s:.1f} s)"
    ),
    ("scale_out_unserved", "never_served"): "{instance} was added to {subject} but never received a request",
    ("engine_launch", "seeded"): "{actor} issued a launch command for {subject} with the weights of {seed}",
    ("launch_served", "launched"): (
        "{subject}: first token {first_served_s:.1f} s after its launch command (weights from {seed})"
    ),
    ("launch_unserved", "never_served"): "{subject} was launched but never received a request",
    # the life of an instance
    ("instance_started", "starting"): "{subject} is starting, {since_desired_s:.1f} s after it was requested",
    ("instance_ready", "healthy"): "{subject} is ready, {since_desired_s:.1f} s after it was requested",
    ("instance_started", "again"): "{subject} is starting again",
    ("instance_ready", "again"): "{subject} is ready again",
    ("instance_ready", "new_run"): "{subject} restarted and is ready at {url}",
    ("instance_draining", "healthy"): "{subject} is draining",
    ("instance_unreachable", "no_answer"): "{subject} does not respond at {url}, so it receives no requests",
    ("instance_unreachable", "unreachable"): "{subject} does not respond at {url}, so it receives no requests",
    ("instance_pending", "waits"): "{subject} {error}",
    ("instance_unhealthy", "failed_checks"): "{subject} fails its health checks ({error}), so it receives no requests",
    ("instance_lost", "out_of_sight"): (
        "{subject} is lost: its engine may still run, so it receives no requests and is not replaced yet ({error})"
    ),
    ("launch_template_paused", "starts_failed"): (
        "{actor} paused the launch template {subject}: {never_ready} instances in a row never became ready, the last "
        "was {instance} ({error})"
    ),
    ("instance_gone", "stopped"): "{subject} has stopped, {since_desired_s:.1f} s after the request to stop",
    ("instance_replaced", "exited"): (
        "{actor} is replacing {subject}, whose process exited ({error}), with {replacement}; it starts in "
        "{pause_s:g} s (failures in the last 5 min: {failures_5min})"
    ),
    ("instance_replaced", "start_timeout"): (
        "{actor} is replacing {subject}, which was {error}, with {replacement}; it starts in {pause_s:g} s (failures "
        "in the last 5 min: {failures_5min})"
    ),
    ("instance_drained", "drained"): "{subject} finished draining in {drained_for_s:.1f} s and is stopping",
    ("instance_drained", "drain_timeout"): (
        "{subject} was still busy after draining for {drained_for_s:.0f} s and is being stopped"
    ),
    ("instance_drained", "ended_while_draining"): "{subject} exited after draining for {drained_for_s:.1f} s",
    ("role_switch", "switched"): "{subject} changed its role from {from} to {to} in {switch_s:.1f} s",
    # weights and sleep
    ("weights_load", "from_engine"): "{subject} loaded its weights from the memory of {from} in {load_s:.1f} s",
    ("weights_load", "from_host"): "{subject} loaded its weights from host memory in {load_s:.1f} s",
    ("weights_load", "from_disk"): "{subject} loaded its weights from disk in {load_s:.1f} s",
    ("weights_load", "present_already"): "{subject} already had its weights",
    ("instance_asleep", "level_1"): "{subject} fell asleep in {asleep_s:.1f} s and keeps its weights in host memory",
    ("instance_asleep", "level_2"): "{subject} fell asleep in {asleep_s:.1f} s and discarded its weights",
    ("instance_awake", "level_1"): "{subject} woke up in {awake_s:.1f} s with its weights from host memory",
    ("instance_awake", "level_2"): "{subject} woke up in {awake_s:.1f} s with its weights reloaded from disk",
    ("instance_awake", "new_run"): "{subject} restarted and is no longer asleep; its weights are {weights}",
    ("instance_awake", "found_awake"): "{subject} is no longer asleep: it was woken or restarted outside Slackline",
    # requested actions: the reason adds nothing
    ("instance_load_ordered", ""): "{actor} requested a weight load for instance {subject}",
    ("instance_sleep_ordered", ""): "{actor} requested sleep level {level} for instance {subject}",
    ("instance_wake_ordered", ""): "{actor} requested a wake-up for instance {subject}",
    # people
    ("sessions_ended", "person_asked"): "{actor} ended {sessions} of the sessions of {subject}",
    # pruning
    ("pruning", "others_in_time"): (
        "{actor} pruned {pruned} requests, so that others are in time, and restored {returned}, within {seconds:g} s"
    ),
    (
        "pruning",
        "orders_over",
    ): "none of the {left} requests that {actor} had pruned is waiting any longer, after {seconds:g} s",
    ("pruning", "room_again"): "{actor} restored {returned} pruned requests within {seconds:g} s",
    # links
    ("records_lost", ""): (
        "{actor} discarded the records of {requests} requests, {refused_requests} of them refused, that arrived within "
        "{seconds:g} s until {until}: stored figures do not include them"
    ),
    ("link_down", "no_answer"): "the link from {source} to {target} is down, so KV transfers use other links",
    ("link_up", "answers_again"): "the link from {source} to {target} is up again after {down_s:.0f} s",
}
# Predicates of other kinds; an unknown kind reads as its own words.
PREDICATES: dict[str, str] = {
    "scale_out": "scaled out {subject}",
    "scale_in": "scaled in {subject}",
    "scale_hold": "did not scale {subject}",
    "role_change": "took an instance from {subject}",
    "instance_replaced": "replaced instance {subject}",
    "instance_started": "started instance {subject}",
    "instance_ready": "found instance {subject} ready",
    "instance_draining": "is draining instance {subject}",
    "launch_template_paused": "paused launch template {subject}",
    "launch_template_resumed": "resumed launch template {subject}",
    "instance_pending": "is waiting to start instance {subject}",
    "instance_unhealthy": "found instance {subject} unhealthy",
    "instance_lost": "lost contact with instance {subject}",
    "instance_drained": "drained instance {subject}",
    "instance_stopped": "stopped instance {subject}",
    "instance_gone": "found that instance {subject} had stopped",
    "instance_failed": "found that instance {subject} had failed",
    "instance_sleep_ordered": "requested sleep for instance {subject}",
    "instance_sleep_failed": "could not put instance {subject} to sleep",
    "instance_wake_failed": "could not wake instance {subject}",
    "instance_role_switch_ordered": "requested a role change for instance {subject}",
    "instance_role_set": "changed instance {subject}",
    "role_switch_failed": "could not change the role of instance {subject}",
    "weights_load_failed": "could not load the weights of instance {subject}",
    "audit_trimmed": "deleted old {subject}",
    "launch_unserved": "found that {subject} served no request after its launch",
    "scale_out_unserved": "found that a new instance of {subject} served no request",
    "queue_cancel": "cancelled {subject}",
    "queue_reprioritise": "changed the priority of {subject}",
    "queue_pause": "paused {subject}",
    "queue_resume": "resumed {subject}",
    "workflow_cancel": "cancelled workflow {subject}",
    "access_refused": "was denied access to {subject}",
    "experiment_cancelled": "cancelled experiment {subject}",
}
TELL_CHANGES = ("instance_role_set", "instance_role_switch_ordered")  # their predicate does not say what changed
LOADS = ("load", "upper", "lower")  # shares, shown in percent of what the fleet can serve
UNBOUNDED = "unbounded load (requests arrive and none finish)"  # a decision has no number for it
NONE_UP = "unbounded load (requests arrive and no instance is up)"
CHANGES = {
    "created": "created",
    "updated": "changed",
    "removed": "removed",
    "revoked": "revoked",
    "rotated": "rotated",
}
TYPES = {
    "slo_class": "SLO class",
    "priority_mapping": "the",
    "api_key": "API key",
    "scaling_policy": "scaling policy",
    "served_model": "model",
}
# What a line shows first, where a decision has it; a line shows at most this many figures.
IMPORTANT = ("load", "utilisation", "wait_over_slo", "arrival_rate", "processing_rate", "rate_ratio", "queued", "ready")
FIGURES_SHOWN = 5
ROW_NUMBERS = ("id", "version", "tick", "error", "scale_out", "scale_in", "action", "launch")


class StoredDecision(Protocol):
    """A stored decision (`controller.models.Decision`)."""

    @property
    def pk(self) -> int: ...

    at: datetime
    actor: str
    kind: str
    subject_type: str
    subject: str
    reason: str
    inputs: dict[str, Any]
    outcome: dict[str, Any]


def sentence(decision: StoredDecision) -> str:
    known = _known(decision)
    return say(decision.kind, decision.actor, decision.subject_type, decision.subject, decision.reason, known)


def _known(decision: StoredDecision) -> dict[str, Any]:
    """Its inputs and its outcome, by their present names."""
    return {RENAMED.get(name, name): value for name, value in {**decision.inputs, **decision.outcome}.items()}


def say(kind: str, actor: str, subject_type: str, subject: str, reason: str, known: Mapping[str, Any]) -> str:
    """One sentence from a decision's parts; `known` are its inputs and its outcome."""
    if kind == "refusals":
        return _refusals(actor, known)
    if kind.startswith("queue_") and (partly := _partly_done(kind, actor, subject, known)):
        return partly
    whole = _whole(sentence_pattern(kind, reason), {**known, "actor": actor, "subject": subject})
    if whole:
        return whole
    what = f"{actor} {_predicate(kind, subject_type, subject or 'all tenants')}"
    # "stopped" needs no "desired_state running to stopped".
    changed = [] if kind in PREDICATES and kind not in TELL_CHANGES else changes(known)
    if changed:
        return f"{what}: {'; '.join(changed)}"
    # "person_created" beside "created ...".
    nothing_new = reason.endswith((*CHANGES, "drained", "stopped", "asked", "ordered"))
    return what if nothing_new or not reason else f"{what}: {reason_in_words(reason)}"


def sentence_pattern(kind: str, reason: str) -> str:
    """That of the reason, else that of the kind; "" where there is none."""
    return SENTENCES.get((kind, reason)) or SENTENCES.get((kind, ""), "")


def _whole(pattern: str, known: Mapping[str, Any]) -> str:
    """Filled in, or "" where the record lacks a figure or has another kind of value there."""
    if "load" in known and known["load"] is None:
        pattern = pattern.replace("load {load:,.0f} %", UNBOUNDED if known.get("ready") else NONE_UP)
    shares = {name: known[name] * 100 for name in LOADS if isinstance(known.get(name), int | float)}
    if "upper" in shares:
        shares["rest"] = min(shares["upper"], FULL * 100)
    try:
        return pattern.format_map({**known, **shares})
    except (KeyError, ValueError, TypeError):
        return ""


def _refusals(actor: str, known: Mapping[str, Any]) -> str:
    """Why is said of each code, and how many it were where there are several."""
    requests, by_code = known.get("requests", "some"), known.get("by_code") or {}
    words = {code: reason_in_words(code).removeprefix("refused: ") for code in by_code}
    why = "; ".join(f"{words[code]} ({count})" if len(by_code) > 1 else words[code] for code, count in by_code.items())
    what = f"{actor} did not serve {requests} request{'' if requests == 1 else 's'} in {known.get('seconds', 10):g} s"
    return f"{what}: {why}" if why else what


# What became of requests that a command was not applied to.
NOT_APPLIED = {
    "too_late": "already with an engine",
    "gone": "no longer in the queue",
    "unanswered": "not acknowledged",
}


def _partly_done(kind: str, actor: str, subject: str, known: Mapping[str, Any]) -> str:
    """Of a command on waiting requests that did not reach all of them; "" where it did."""

    def did(whom: str) -> str:
        return f"{actor} {_predicate(kind, 'request', whom)}"

    if "applied" not in known:
        return f"{did('nothing')}: no gateway could be reached for {subject}" if "error" in known else ""
    found = {name: known.get(name, 0) for name in ("applied", *NOT_APPLIED)}  # ids, or how many
    counts = {name: len(value) if isinstance(value, list) else value for name, value in found.items()}
    rest = [f"{counts[name]} {words}" for name, words in NOT_APPLIED.items() if counts[name]]
    if left := known.get("of", 0) - known.get("told", 0):
        rest.append(f"{left} not sent")
    return f"{did(str(counts['applied'] or 'none'))} of {subject}: {', '.join(rest)}" if rest else ""


def _predicate(kind: str, subject_type: str, subject: str) -> str:
    """`slo_class_updated` is "changed SLO class interactive"."""
    if kind in PREDICATES:
        return PREDICATES[kind].format(subject=subject)
    for ending, done in CHANGES.items():
        if kind.endswith(f"_{ending}"):
            what = subject_type or kind.removesuffix(f"_{ending}")
            if what == subject.replace(" ", "_"):
                return f"{done} the {subject}"  # there is one, named as its kind is
            if what == "priority_mapping":
                subject = subject.replace("priorities", "priority mapping", 1)
            return f"{done} {TYPES.get(what, what.replace('_', ' '))} {subject}"
    return f"{kind.replace('_', ' ')} {subject}"


def telling(known: Mapping[str, Any]) -> dict[str, Any]:
    """The most telling figures; nested objects and row numbers are for the audit's own page."""
    plain = {
        name: value
        for name, value in known.items()
        if not isinstance(value, dict | list) and name not in ROW_NUMBERS and value not in ("", None)
    }
    first = [name for name in IMPORTANT if name in plain]
    return {name: plain[name] for name in (first or list(plain))[:FIGURES_SHOWN]}


def figures_line(known: Mapping[str, Any]) -> str:
    """The most telling ones as text."""
    return line(telling(known))


def _beside(kind: str, reason: str, known: Mapping[str, Any]) -> str:
    """What the sentence does not say already."""
    said = {name for _, name, _, _ in Formatter().parse(sentence_pattern(kind, reason)) if name}
    if kind == "refusals":
        said |= {"requests", "seconds"}
    return figures_line({name: value for name, value in known.items() if name not in said})


def message_of(decision: StoredDecision) -> DecisionMessage:
    """One line of the live list. Its sentence is made here and nowhere else."""
    known = _known(decision)
    return DecisionMessage(
        id=str(decision.pk),
        at=decision.at.timestamp(),
        sentence=sentence(decision),
        figures_text=_beside(decision.kind, decision.reason, known),
    )
