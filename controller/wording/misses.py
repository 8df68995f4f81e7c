"""Why a request missed its SLO, in sentences made of what its own record says and of nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller.core.types import ENGINE_REJECTED
from controller.wording.measures import count, ms
from controller.wording.request_steps import (
    RecordedRequest,
    due_s,
    first_token_stages,
    is_given_up,
    longest_stage,
    never_decoded_s,
)
from controller.wording.vocabulary import named, reason_in_words, ruled_out

LEAST_S = 0.0005  # a shorter stage is not worth a word
LONGEST = {
    "queue": "The gateway's queue",
    "prefill": "The prefill",
    "wait": "The wait for a decode instance",
    "transfer": "The KV transfer",
    "decode": "The first decode step",
}
ENDS = ("refuse", "expire", "cancel", "place")  # kinds of decisions after which nothing more is tried


def why_missed(row: RecordedRequest) -> list[str]:
    """Empty where it attained, or where it is counted as no miss: its client left, or the engine refused it."""
    if row.attained or row.error_code == ENGINE_REJECTED:
        return []
    if row.outcome in ("refused", "expired", "failed"):
        return _unserved(row)
    if row.outcome == "cut":
        if row.error_code == "cancelled":
            tokens = _number(row.output_tokens, "token")
            return [f"An operator cancelled its workflow during the answer, after {tokens}."]
        return [f"Its instance {row.instance} failed during the answer, after {_number(row.output_tokens, 'token')}."]
    return _late(row) if row.outcome == "ok" else []


def _unserved(row: RecordedRequest) -> list[str]:
    last = row.decisions[-1] if row.decisions else {}
    kind, reason = str(last.get("kind", "")), str(last.get("reason", ""))
    prefilled = never_decoded_s(row)
    if prefilled is not None and is_given_up(row):
        return [_not_decoded(row, prefilled, reason)]
    if kind in ENDS and (told := UNSERVED.get(reason)) is not None:
        try:
            return told(row, last.get("figures") or {}, last.get("rejected") or {})
        except (KeyError, TypeError, ValueError):
            pass  # of an older gateway, without those figures
    code = reason if kind in ENDS and reason else row.error_code or row.outcome
    return [f"It was not served: {reason_in_words(code)}."]


Told = Mapping[str, Any]


def _expired(row: RecordedRequest, figures: Told, rejected: Told) -> list[str]:
    after = f"It timed out after {ms(figures['waited_s'])} in the queue"
    if figures.get("paused"):
        return [f"{after}: an operator had paused it."]
    able = figures["instances"]
    if not able and figures.get("instance_starting"):
        return [f"{after}: no instance of {row.model} was up, and the one that was starting was not ready by then."]
    if not able:
        return [f"{after}: no instance of {row.model} accepted requests."]
    them = f"all {able} available instances were busy" if able > 1 else "the only available instance was busy"
    had = f", with {_number(figures['outstanding'], 'request')}" if "outstanding" in figures else ""
    others = f", and {_more(figures['queued'])} waiting in the queue" if figures.get("queued") else ""
    said = [f"{after}: {them}{had}{others}."]
    if len(rejected) > 1:  # of one alone the sentence before has said it
        said.append("; ".join(f"{name} had {ruled_out(what)}" for name, what in rejected.items()) + ".")
    if figures.get("pruned"):
        said.append("It had been pruned: requests that could still meet their targets went first.")
    elif figures.get("hopeless"):
        due = f"Its first token was due after {ms(row.target_ttft_s)}"
        said.append(f"{due}; once that had passed, requests that could still meet their targets went first.")
    return said


def _no_instance(row: RecordedRequest, figures: Told, rejected: Told) -> list[str]:
    if "waited_s" in figures:
        waited = f"It was refused after {ms(figures['waited_s'])} in the queue"
        return [f"{waited}: no instance of {row.model} was up, and none was starting any more."]
    return [f"It was refused immediately: no instance of {row.model} was up or starting."]


def _starts_too_late(row: RecordedRequest, figures: Told, rejected: Told) -> list[str]:
    starts, may = ms(figures["starts_in_s"]), ms(figures["waiting_s"])
    return [
        f"It was refused: no instance was up, the next one was expected in {starts}, and its waiting time was {may}."
    ]


def _queue_full(row: RecordedRequest, figures: Told, rejected: Told) -> list[str]:
    return [f"It was refused: {count(figures['queued'])} requests were waiting, the limit of the gateway's queue."]


def _behind(row: RecordedRequest, figures: Told, rejected: Told) -> list[str]:
    after, others = ms(figures["waited_s"]), count(figures["queued"])
    return [
        f"It was refused after {after} in the queue: it would have missed its targets behind the {others} ahead of it."
    ]


def _alone(row: RecordedRequest, figures: Told, rejected: Told) -> list[str]:
    needs = {
        "decode_step_s": ("one token was predicted to take {}", "tpot_s"),
        "answer_s": ("the whole answer was predicted to take {}", "deadline_s"),
        "prefill_s": ("prefill was predicted to take {}", "ttft_s"),
    }
    name = next(name for name in needs if name in figures)
    takes, bound = needs[name]
    whole = ("thinking_deadline_s", "workflow_deadline_s", "deadline_s")
    bound = next(each for each in (bound, *whole) if each in figures)
    alone, limit = takes.format(ms(figures[name])), f"its {named(bound)} was {ms(figures[bound])}"
    return [f"It was refused: even on an idle instance {alone}, and {limit}."]


def _not_decoded(row: RecordedRequest, prefilled: float, code: str) -> str:
    done = f"It was prefilled on {row.instance} {ms(prefilled)} after its arrival"
    return f"{done}, and failed after {ms(row.e2e_s)} without being decoded: {reason_in_words(code)}."


def _engine_failed(row: RecordedRequest, figures: Told, rejected: Told) -> list[str]:
    tries = f"{figures['attempts']} attempts" if figures["attempts"] > 1 else "one attempt"
    return [f"It failed after {tries}; the last one, on {figures['instance']}, ended with: {figures['error']}."]


def _ended_engines(row: RecordedRequest, figures: Told, rejected: Told) -> list[str]:
    found = f"The engines {figures['died']} died while they computed it, and nothing else was computed there."
    if "quarantine_s" not in figures:
        return [found, "It was not tried again."]
    return [found, f"It was not tried again, and the same request is refused for {ms(figures['quarantine_s'])}."]


def _quarantined(row: RecordedRequest, figures: Told, rejected: Told) -> list[str]:
    before = f"It was refused: the engines {figures['died']} died while they computed the same request before."
    return [before, f"It can run again in {ms(figures['quarantine_s'])}."]


def _no_time(row: RecordedRequest, figures: Told, rejected: Told) -> list[str]:
    where = f"{figures['instance']} failed ({figures['error']})"
    return [f"{where}, and too little of its waiting time was left for a retry on another instance."]


def _workflow_cancelled(row: RecordedRequest, figures: Told, rejected: Told) -> list[str]:
    return ["An operator cancelled its workflow."]


def _cancelled(row: RecordedRequest, figures: Told, rejected: Told) -> list[str]:
    return [f"{figures['actor']} cancelled it in the queue."]


UNSERVED = {
    "cancelled_by_operator": _cancelled,
    "workflow_cancelled_by_operator": _workflow_cancelled,
    "waiting_time": _expired,
    "no_instance": _no_instance,
    "starts_too_late": _starts_too_late,
    "queue_full": _queue_full,
    "unattainable_in_queue": _behind,
    "infeasible_alone": _alone,
    "engine_failed": _engine_failed,
    "ended_engines": _ended_engines,
    "quarantined": _quarantined,
    "no_time_to_retry": _no_time,
}


def _late(row: RecordedRequest) -> list[str]:
    """Served, but late: each target that was missed, and how busy the instance was at dispatch."""
    said = []
    if not row.ttft_met and row.target_thinking_s is not None:
        said.append(_thinking(row))
    elif not row.ttft_met:
        said.append(_first_token(row) if row.ttft_s is not None else _unseen(row))
        said += _as_sent(row)
    if not row.tpot_met and row.tpot_s is not None:
        said.append(
            f"Its tokens took {ms(row.tpot_s)} each on {row.instance}; its TPOT target was {ms(row.target_tpot_s)}."
        )
    if not row.deadline_met and row.e2e_s is not None:
        said.append(f"Its answer finished after {ms(row.e2e_s)}; its deadline was {ms(row.target_deadline_s)}.")
    return said


def _thinking(row: RecordedRequest) -> str:
    due = f"its thinking deadline was {ms(row.target_thinking_s)}"
    if row.first_answer_s is None:
        return f"No token of its answer came, only reasoning; {due}."
    return f"The first token of its answer came after {ms(row.first_answer_s)}; {due}."


def _first_token(row: RecordedRequest) -> str:
    first, queue = row.ttft_s or 0.0, row.queue_s or 0.0
    late = f"Its first token arrived after {ms(first)}, {ms(first - row.target_ttft_s)} late"
    longest = longest_stage(row)
    if longest in ("", "engine") or row.prefill_instance == "":
        return f"{late}: {ms(queue)} in the gateway's queue, {ms(first - queue)} on {row.instance}."
    named = {
        "queue": "in the gateway's queue",
        "prefill": f"of prefill on {row.prefill_instance}",
        "wait": "of waiting for a decode instance",
        "transfer": f"of KV transfer to {row.instance}",
        "decode": f"until its first decode step on {row.instance} ended",
    }
    stages = [f"{ms(each.seconds)} {named[each.name]}" for each in first_token_stages(row) if each.seconds > LEAST_S]
    return f"{late}: {', '.join(stages)}. {LONGEST[longest]} took the longest."


def _unseen(row: RecordedRequest) -> str:
    due, queue = ms(due_s(row, row.output_tokens)), ms(row.queue_s)
    took = f"Its answer was not streamed and took {ms(row.e2e_s)}, of which {queue} in the gateway's queue"
    return f"{took}; its TTFT and TPOT targets allow {due} for {_number(row.output_tokens, 'token')}."


_SPARE = {
    "hopeless_spare_budget": " It was too late to meet its targets by then, so it was served from spare capacity.",
    "late_everywhere": " No instance could meet its targets by then, so others went first.",
    "pruned_spare_budget": " It had been pruned so that others were in time, so it was served from spare capacity.",
}


def _as_sent(row: RecordedRequest) -> list[str]:
    """What the dispatcher saw at the last dispatch."""
    sent = [step for step in row.decisions if step.get("kind") == "dispatch"]
    figures = (sent[-1].get("figures") or {}) if sent else {}
    if "outstanding" not in figures or "queued" not in figures:
        return []
    where = row.prefill_instance or row.instance
    others = f"{where} had {_number(figures['outstanding'], 'other request')}"
    others += f", and {_more(figures['queued'])} waiting"
    return [f"When it was dispatched, {others}.{_SPARE.get(str(sent[-1].get('reason')), '')}"]


def _more(number: int) -> str:
    return "1 more was" if number == 1 else f"{count(number)} more were"


def _number(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{count(number)} {what}s"
