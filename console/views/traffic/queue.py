"""The Queue page, and the commands on waiting requests."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from datetime import timedelta
from functools import partial
from typing import Any

import orjson
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_GET, require_POST

from console.access import actor_of, allows
from console.forms.numbers import number_of
from console.live.queue_commands import Order, RunningCommand, matching
from console.live.queue_view import window_of
from controller.selectors.records import decisions
from controller.selectors.roles import UserRole
from controller.services.records.queue_commands import (
    queue_command_outcome,
    queue_command_record,
    queue_filter_command_record,
)
from workers import live

REQUESTS_MAX = 500
PRIORITY_MAX = 1000
ENDED_KEPT = timedelta(hours=1)  # how long the outcome of a command on all can be asked for
STOPPED = "Stopped."
ORDER_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
MOMENT = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?", re.ASCII)
# Each command, and how its answer names a request that it was applied to.
COMMANDS = {"cancel": "cancelled", "pause": "paused", "resume": "resumed", "reprioritise": "reprioritised"}


@require_GET
@allows(UserRole.VIEWER)
def queue(request: HttpRequest) -> HttpResponse:
    return render(request, "console/traffic/queue.html")


@require_POST
@allows(UserRole.OPERATOR)
def queue_command(request: HttpRequest) -> JsonResponse:
    """Sends the command to every gateway, waits for the answers and records the outcome. Answers with JSON."""
    kind, ids = request.POST.get("kind", ""), list(dict.fromkeys(request.POST.getlist("request")))
    if kind not in COMMANDS:
        return JsonResponse({"message": f"Unknown command. Use one of: {', '.join(COMMANDS)}."}, status=400)
    if not 1 <= len(ids) <= REQUESTS_MAX or any(len(each) > 64 for each in ids):
        return JsonResponse({"message": f"Select 1 to {REQUESTS_MAX} requests."}, status=400)
    priority = priority_of(request) if kind == "reprioritise" else None
    if kind == "reprioritise" and priority is None:
        return JsonResponse({"message": f"Enter a priority from 0 (highest) to {PRIORITY_MAX}."}, status=400)
    actor = actor_of(request)
    record = partial(queue_command_record, actor=actor, kind=kind, request_ids=ids, priority=priority)
    lost = ""
    try:
        answers = live.send_command(actor.name, kind, ids, priority=priority)
    except live.AnswersLost as error:
        answers, lost = error.answers, str(error)
    except live.LiveUnavailable as error:
        record(outcome={"error": str(error)})
        said = f"Redis is unavailable, so no gateway can be reached. No requests were {COMMANDS[kind]}."
        return JsonResponse({"message": said}, status=503)
    complete = bool(answers) and not answers.silent and not lost
    outcome = queue_command_outcome(ids, answers, complete=complete)
    record(outcome=outcome | ({"error": lost} if lost else {}))
    return JsonResponse({"message": say(kind, outcome, lost), **outcome}, status=200 if complete else 503)


@require_POST
@allows(UserRole.OPERATOR)
def queue_command_all(request: HttpRequest) -> HttpResponseBase:
    """A command on all requests that match a filter and arrived before the operator confirmed.

    Streams a line of JSON after each batch that was sent to a gateway, and a last one with a message. Closing the
    connection stops the command after the current batch.
    """
    order = order_of(request)
    if isinstance(order, str):
        return JsonResponse({"message": order}, status=400)
    actor = actor_of(request)
    try:
        found = matching(order)
    except live.LiveUnavailable as error:
        tried = {"key": order.key, "text": order.text, "until": order.until}
        queue_filter_command_record(
            actor=actor,
            kind=order.kind,
            filter=tried,
            request_ids=[],
            outcome={"error": str(error)},
            priority=order.priority,
        )
        said = f"Redis is unavailable, so no gateway can be reached. No requests were {COMMANDS[order.kind]}."
        return JsonResponse({"message": said}, status=503)
    if not found.by_gateway:
        return JsonResponse({"message": "No gateway reported its queue. No requests were changed."}, status=503)
    lines = _lines(RunningCommand(order, found, actor))
    return StreamingHttpResponse(lines, content_type="application/x-ndjson", headers={"X-Accel-Buffering": "no"})


async def _lines(command: RunningCommand) -> AsyncIterator[bytes]:
    yield orjson.dumps(command.progress()) + b"\n"
    async with aclosing(command.run()) as parts:
        async for progress in parts:
            yield orjson.dumps(progress) + b"\n"
    yield orjson.dumps({**command.progress(), **said_of(command.order.kind, command.outcome)}) + b"\n"


@require_GET
@allows(UserRole.OPERATOR)
def queue_command_ended(request: HttpRequest, order_id: str) -> JsonResponse:
    """The outcome of one's own command on all matching requests, from its audit record: for a browser that stopped it
    or lost the connection. `known` is false until the command has ended, and if it never began."""
    own = decisions.search(actor=request.user.get_username(), since=timezone.now() - ENDED_KEPT)
    decision = own.filter(kind__in=[f"queue_{kind}" for kind in COMMANDS], outcome__order=order_id).first()
    if decision is None:
        return JsonResponse({"known": False})
    kind = decision.kind.removeprefix("queue_")
    return JsonResponse({"known": True, "decision": decision.pk, **said_of(kind, decision.outcome)})


def order_of(request: HttpRequest) -> Order | str:
    """The command that was posted, or what is wrong with it."""
    kind, given = request.POST.get("kind", ""), request.POST.get("until", "")
    if kind not in COMMANDS:
        return f"Unknown command. Use one of: {', '.join(COMMANDS)}."
    window = window_of({"key": request.POST.get("key", ""), "text": request.POST.get("text", "")})
    if window is None:
        return "The filter is too long."
    until = float(given) if MOMENT.fullmatch(given) else None
    if until is None:
        return "until: must be the time of confirmation, in epoch seconds."
    priority = priority_of(request) if kind == "reprioritise" else None
    if kind == "reprioritise" and priority is None:
        return f"Enter a priority from 0 (highest) to {PRIORITY_MAX}."
    order_id = request.POST.get("order", "")
    if order_id and not ORDER_ID.fullmatch(order_id):
        return "order: must be 32 hexadecimal digits."
    return Order(kind, window.key, window.text, until, priority, order_id)


def said_of(kind: str, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """The outcome of a command on all matching requests, in words; `ok` if every request was reached and answered."""
    return {"message": say_all(kind, outcome), "ok": outcome["ended"] == "all" and not outcome["unanswered"]}


def say_all(kind: str, outcome: Mapping[str, Any]) -> str:
    done = COMMANDS[kind]
    parts = [f"{outcome['applied']} {done}"]
    if outcome["too_late"]:
        parts.append(f"{outcome['too_late']} already sent to an engine")
    if outcome["gone"]:
        parts.append(f"{outcome['gone']} no longer in the queue")
    said = [STOPPED] if outcome["ended"] == "stopped" else []
    said.append(f"{', '.join(parts)}.")
    if outcome["unanswered"]:
        said.append(not_known(outcome["unanswered"], done))
    away = "Redis is unavailable: " if outcome["ended"] == "redis_away" else ""
    if left := outcome["of"] - outcome["told"]:
        said.append(f"{away}{left} unchanged.")
    if outcome["missing"]:
        said.append("Some gateways did not report their queue; their requests were not changed.")
    return " ".join(said)


def not_known(count: int, done: str) -> str:
    requests = "1 request" if count == 1 else f"{count} requests"
    return f"No answer for {requests}, which may have been {done}, or may be within 5 seconds."


def priority_of(request: HttpRequest) -> int | None:
    given = number_of(request.POST.get("priority", ""))
    return given if given is not None and given <= PRIORITY_MAX else None


def say(kind: str, outcome: Mapping[str, Any], lost: str = "") -> str:
    done = COMMANDS[kind]
    parts = [f"{len(outcome['applied'])} {done}"] if outcome["applied"] or not outcome["unanswered"] else []
    if outcome["too_late"]:
        parts.append(f"{len(outcome['too_late'])} already sent to an engine")
    if outcome["gone"]:
        parts.append(f"{len(outcome['gone'])} no longer in the queue")
    said = [f"{', '.join(parts)}."] if parts else []
    if outcome["unanswered"]:
        silent = "Some gateways did not answer in time." if outcome["gateways"] else "No gateway answered in time."
        why = "Redis became unavailable before the answer." if lost else silent
        said += [why, not_known(len(outcome["unanswered"]), done), "Check the queue for the current state."]
    return " ".join(said)
