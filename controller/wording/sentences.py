"""Decisions as sentences: who did what to whom, and why, with the figures that matter. The rest is in the audit."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from string import Formatter
from typing import Any, Protocol

from controller.core.messages import DecisionMessage
from controller.wording.changes import changes
from controller.wording.figures import line
from controller.wording.reasons import reason_in_words

# Whole sentences for what happens often; the figures are those the decision was made on.
SENTENCES: dict[tuple[str, str], str] = {
    (
        "scale_out",
        "load_above_upper",
    ): "{actor} scaled {subject} out: load {load:.2f} is above {upper:g} with {ready} ready",
    ("scale_out", "below_min"): "{actor} scaled {subject} out: {ready} ready, at least {min_instances} wanted",
    ("scale_in", "load_below_lower"): (
        "{actor} scaled {subject} in: load {load:.2f} was below {lower:g} for {low_for_s:.0f} s; {instance} goes"
    ),
    ("scale_in", "above_max"): "{actor} scaled {subject} in: {ready} ready, at most {max_instances} allowed",
    ("scale_hold", "relieved"): "{actor} leaves {subject} as it is: load {load:.2f} is no longer above {upper:g}",
    ("scale_hold", "settling"): "{actor} waits with {subject}: load {load:.2f}, but the last change has not settled",
    ("scale_hold", "at_max"): "{actor} cannot scale {subject} out: load {load:.2f}, but {max_instances} is the limit",
    ("scale_hold", "no_device"): "{actor} cannot scale {subject} out: load {load:.2f}, but no device is free",
    ("scale_hold", "telemetry_stale"): "{actor} does not touch {subject}: what it sees is {snapshot_age_s:.1f} s old",
    ("scale_hold", "nothing_to_start"): (
        "{actor} cannot scale {subject} out: load {load:.2f}, but there is no instance of ours to start another like"
    ),
    ("scale_hold", "nothing_to_stop"): (
        "{actor} cannot scale {subject} in: {ready} ready, at most {max_instances} allowed, all run by somebody else"
    ),
    ("instance_started", "starting"): "{subject} starts, {since_wish_s:.1f} s after it was asked for",
    ("instance_ready", "healthy"): "{subject} is ready, {since_wish_s:.1f} s after it was asked for",
    ("instance_ready", "new_run"): "{subject} was started again and is ready at {url}",
    ("instance_draining", "healthy"): "{subject} ends what it has and takes no more",
    ("instance_unreachable", "no_answer"): "{subject} does not answer at {url}: nothing is sent there",
    ("instance_unreachable", "unreachable"): "{subject} does not answer at {url}: nothing is sent there",
    ("instance_gone", "stopped"): "{subject} is gone, {since_wish_s:.1f} s after that was asked for",
    ("instance_replaced", "exited"): (
        "{actor} puts {replacement} in the place of {subject}, whose process ended ({error}); "
        "{failures_5min} such within five minutes, so it waits {pause_s:g} s"
    ),
    ("instance_replaced", "start_timeout"): (
        "{actor} puts {replacement} in the place of {subject}, which was {error}; "
        "{failures_5min} such within five minutes, so it waits {pause_s:g} s"
    ),
    ("instance_drained", "drained"): "{subject} had nothing left to do after {drained_for_s:.1f} s and stops",
    ("instance_drained", "drain_timeout"): (
        "{subject} was still busy after {drained_for_s:.0f} s of draining and is cut off"
    ),
    ("instance_drained", "ended_while_draining"): "{subject} ended after {drained_for_s:.1f} s of draining",
    ("scale_hold", "rest_would_exceed_upper"): (
        "{actor} keeps {subject} at a load of {load:.2f}: with one instance less the requests that come would be more "
        "than {upper:g} allows"
    ),
    ("scale_warm", "pool_below_target"): "{actor} fills up the warm pool of {subject}: {warm} there, {wanted} wanted",
    ("scale_warm", "pool_above_target"): "{actor} cuts the warm pool of {subject}: {warm} there, {wanted} wanted",
    ("scale_out_served", "warm"): (
        "{instance} of {subject} gave its first token {first_served_s:.1f} s after it was asked for, warm, its weights "
        "from {source} in {load_s:.1f} s"
    ),
    ("scale_out_served", "started"): (
        "{instance} of {subject} gave its first token {first_served_s:.1f} s after it was asked for, started anew"
    ),
    ("scale_out_served", "woken"): (
        "{instance} of {subject} gave its first token {first_served_s:.1f} s after it was asked for, woken, its "
        "weights from {source} in {load_s:.1f} s"
    ),
    ("engine_launch", "seeded"): "{actor} gave out the command that starts {subject} with the weights of {seed}",
    ("launch_served", "launched"): (
        "{subject} gave its first token {first_served_s:.1f} s after the command to start it with the weights of {seed}"
    ),
    ("launch_unserved", "never_served"): "{subject} was launched and no request ever came to it",
    ("scale_out_unserved", "never_served"): "{instance} of {subject} was asked for and no request ever came to it",
    ("link_down", "no_answer"): "the link from {source} to {target} does not answer: KV caches take other ways",
    ("link_up", "answers_again"): "the link from {source} to {target} answers again after {down_s:.0f} s",
    ("role_change", "demand_diverged"): "{actor} turns {instance} from {from} to {to}: {subject} can spare it",
    ("role_switch", "switched"): "the engine of {subject} went from {from} to {to} in {switch_s:.1f} s",
    ("weights_load", "from_engine"): "{subject} has its weights from the memory of {from} after {load_s:.1f} s",
    ("weights_load", "from_host"): "{subject} has its weights from its host's copy after {load_s:.1f} s",
    ("weights_load", "from_disk"): "{subject} has its weights from the disk after {load_s:.1f} s",
    ("weights_load", "present_already"): "{subject} had its weights already",
    ("instance_asleep", "level_1"): "{subject} is asleep after {asleep_s:.1f} s, its weights in host memory",
    ("instance_asleep", "level_2"): "{subject} is asleep after {asleep_s:.1f} s, its weights given up",
    ("instance_awake", "level_1"): "{subject} is awake after {awake_s:.1f} s, its weights from host memory",
    ("instance_awake", "level_2"): "{subject} is awake after {awake_s:.1f} s, its weights read from the disk again",
    ("instance_awake", "new_run"): "{subject} was started again and no longer sleeps, its weights {weights}",
    ("instance_awake", "found_awake"): "{subject} sleeps no more: somebody else woke it or started it again",
    # Whoever ordered it; the reason says no more than that.
    ("instance_load_ordered", ""): "{actor} ordered instance {subject} to load its weights",
    ("instance_sleep_ordered", ""): "{actor} ordered instance {subject} to sleep, at level {level}",
    ("instance_wake_ordered", ""): "{actor} ordered instance {subject} to wake up",
}
# Verbs of other kinds; an unknown kind reads as its own words.
VERBS: dict[str, str] = {
    "scale_out": "scaled out",
    "scale_in": "scaled in",
    "scale_hold": "left as it is:",
    "role_change": "took an instance from",
    "instance_replaced": "replaced instance",
    "instance_started": "started instance",
    "instance_ready": "found ready instance",
    "instance_draining": "lets instance finish:",
    "instance_drained": "drained instance",
    "instance_stopped": "stopped instance",
    "instance_gone": "saw instance go:",
    "instance_failed": "saw instance fail:",
    "instance_sleep_ordered": "ordered to sleep instance",
    "instance_sleep_failed": "could not put to sleep instance",
    "instance_wake_failed": "could not wake up instance",
    "instance_role_switch_ordered": "ordered another role for instance",
    "instance_role_set": "changed instance",
    "role_switch_failed": "could not switch the role of instance",
    "weights_load_failed": "got no weights into instance",
    "audit_trimmed": "forgot old",
    "launch_unserved": "saw no request served by the launched",
    "scale_out_unserved": "saw no request served by a new instance of",
    "queue_cancel": "cancelled",
    "queue_reprioritise": "changed the priority of",
    "queue_pause": "paused",
    "queue_resume": "resumed",
    "access_refused": "was refused",
    "experiment_cancelled": "cancelled experiment",
}
TELL_CHANGES = ("instance_role_set", "instance_role_switch_ordered")  # of these the verb does not say it all
ENDLESS = "a load without bound (requests come and none is finished)"  # a decision has no number for it
CHANGES = {"created": "created", "updated": "changed", "removed": "removed", "revoked": "revoked"}
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


class Recorded(Protocol):
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


def sentence(decision: Recorded) -> str:
    known = {**decision.inputs, **decision.outcome}
    return say(decision.kind, decision.actor, decision.subject_type, decision.subject, decision.reason, known)


def say(kind: str, actor: str, subject_type: str, subject: str, reason: str, known: Mapping[str, Any]) -> str:
    """One sentence from a decision's parts; `known` are its inputs and its outcome."""
    if kind == "refusals":
        return _refusals(actor, known)
    if kind.startswith("queue_") and (partly := _partly_done(kind, actor, subject, known)):
        return partly
    whole = _whole(sentence_pattern(kind, reason), {**known, "actor": actor, "subject": subject})
    if whole:
        return whole
    what = f"{actor} {_verb(kind, subject_type)} {subject or 'all tenants'}"
    # "stopped" needs no "desired_state running to stopped".
    changed = [] if kind in VERBS and kind not in TELL_CHANGES else changes(known)
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
        pattern = pattern.replace("load {load:.2f}", ENDLESS)
    try:
        return pattern.format_map(known)
    except (KeyError, ValueError, TypeError):
        return ""


def _refusals(actor: str, known: Mapping[str, Any]) -> str:
    """Why is said of each code, and how many it were where there are several."""
    requests, by_code = known.get("requests", "some"), known.get("by_code") or {}
    words = {code: reason_in_words(code).removeprefix("refused: ") for code in by_code}
    why = "; ".join(f"{words[code]} ({count})" if len(by_code) > 1 else words[code] for code, count in by_code.items())
    what = f"{actor} refused {requests} request{'' if requests == 1 else 's'} in {known.get('seconds', 10):g} s"
    return f"{what}: {why}" if why else what


# What became of requests that a command was not applied to.
NOT_APPLIED = {"too_late": "were with an engine", "gone": "had left the queue", "unanswered": "without an answer"}


def _partly_done(kind: str, actor: str, subject: str, known: Mapping[str, Any]) -> str:
    """Of a command on waiting requests that did not reach all of them; "" where it did."""
    what = f"{actor} {_verb(kind, 'request')}"
    if "applied" not in known:
        return f"{what} nothing: no gateway could be told of {subject}" if "error" in known else ""
    found = {name: known.get(name, 0) for name in ("applied", *NOT_APPLIED)}  # ids, or how many
    counts = {name: len(value) if isinstance(value, list) else value for name, value in found.items()}
    rest = [f"{counts[name]} {words}" for name, words in NOT_APPLIED.items() if counts[name]]
    if left := known.get("of", 0) - known.get("told", 0):
        rest.append(f"{left} not told")
    return f"{what} {counts['applied'] or 'none'} of {subject}: {', '.join(rest)}" if rest else ""


def _verb(kind: str, subject_type: str) -> str:
    """`slo_class_updated` is "changed SLO class"."""
    if kind in VERBS:
        return VERBS[kind]
    for ending, done in CHANGES.items():
        if kind.endswith(f"_{ending}"):
            what = subject_type or kind.removesuffix(f"_{ending}")
            return f"{done} {TYPES.get(what, what.replace('_', ' '))}"
    return kind.replace("_", " ")


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


def message_of(decision: Recorded) -> DecisionMessage:
    """One line of the live list. The sentence is made here, for whoever shows it: nobody makes it a second time."""
    known = {**decision.inputs, **decision.outcome}
    return DecisionMessage(
        id=str(decision.pk),
        at=decision.at.timestamp(),
        sentence=sentence(decision),
        figures_text=_beside(decision.kind, decision.reason, known),
    )
