"""Queue page and the commands that act on what waits."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import orjson
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_GET, require_POST

from console.access import allows
from console.queue_all import Order, Telling, matching
from console.queue_view import window_of
from controller.selectors.roles import Role
from controller.services.actors import Actor
from controller.services.queue_commands import (
    queue_command_outcome,
    queue_command_record,
    queue_filter_command_record,
)
from workers import live

REQUESTS_MAX = 500
PRIORITY_MAX = 1000
MOMENT = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?", re.ASCII)
# Commands, and what is said of a request that one was applied to.
COMMANDS = {"cancel": "cancelled", "pause": "paused", "resume": "resumed", "reprioritise": "given another priority"}


@require_GET
@allows(Role.VIEWER)
def queue(request: HttpRequest) -> HttpResponse:
    return render(request, "console/queue.html")


@require_POST
@allows(Role.OPERATOR)
def queue_command(request: HttpRequest) -> JsonResponse:
    """Tells every gateway, waits for the answers, records what came of it. Answers JSON for the page's script."""
    kind, ids = request.POST.get("kind", ""), list(dict.fromkeys(request.POST.getlist("request")))
    if kind not in COMMANDS:
        return JsonResponse({"message": f"Unknown command; known: {', '.join(COMMANDS)}."}, status=400)
    if not 1 <= len(ids) <= REQUESTS_MAX or any(len(each) > 64 for each in ids):
        return JsonResponse({"message": f"Choose 1 to {REQUESTS_MAX} requests."}, status=400)
    priority = priority_of(request) if kind == "reprioritise" else None
    if kind == "reprioritise" and priority is None:
        return JsonResponse({"message": f"Say which priority: 0 (the highest) to {PRIORITY_MAX}."}, status=400)
    actor = Actor.person(request.user.get_username())
    record = partial(queue_command_record, actor=actor, kind=kind, request_ids=ids, priority=priority)
    try:
        answers = live.send_command(actor.name, kind, ids, priority=priority)
    except live.LiveUnavailable as error:
        record(outcome={"error": str(error)})
        said = f"Redis is away: no gateway can be told. Nothing was {COMMANDS[kind]}."
        return JsonResponse({"message": said}, status=503)
    outcome = queue_command_outcome(ids, answers)
    record(outcome=outcome)
    return JsonResponse({"message": say(kind, outcome), **outcome}, status=200 if outcome["gateways"] else 503)


@require_POST
@allows(Role.OPERATOR)
def queue_command_all(request: HttpRequest) -> HttpResponseBase:
    """On all that match a filter and arrived until the person confirmed.

    Answers a line of JSON after each part that was told, and one with a message at the end. Whoever closes the
    connection stops it there.
    """
    order = order_of(request)
    if isinstance(order, str):
        return JsonResponse({"message": order}, status=400)
    actor = Actor.person(request.user.get_username())
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
        said = f"Redis is away: no gateway can be told. Nothing was {COMMANDS[order.kind]}."
        return JsonResponse({"message": said}, status=503)
    if not found.by_gateway:
        return JsonResponse({"message": "No gateway said what waits there. Nothing was done."}, status=503)
    lines = _lines(Telling(order, found, actor))
    return StreamingHttpResponse(lines, content_type="application/x-ndjson", headers={"X-Accel-Buffering": "no"})


async def _lines(telling: Telling) -> AsyncIterator[bytes]:
    yield orjson.dumps(telling.progress()) + b"\n"
    async with aclosing(telling.run()) as parts:
        async for progress in parts:
            yield orjson.dumps(progress) + b"\n"
    end = {"message": say_all(telling), "ok": not telling.error and not telling.counts["unanswered"]}
    yield orjson.dumps({**telling.progress(), **end}) + b"\n"


def order_of(request: HttpRequest) -> Order | str:
    """What was asked for, or what is wrong with it."""
    kind, given = request.POST.get("kind", ""), request.POST.get("until", "")
    if kind not in COMMANDS:
        return f"Unknown command; known: {', '.join(COMMANDS)}."
    window = window_of({"key": request.POST.get("key", ""), "text": request.POST.get("text", "")})
    if window is None:
        return "The filter is too long."
    until = float(given) if MOMENT.fullmatch(given) else None
    if until is None:
        return "until: epoch seconds of the moment at which this was confirmed."
    priority = priority_of(request) if kind == "reprioritise" else None
    if kind == "reprioritise" and priority is None:
        return f"Say which priority: 0 (the highest) to {PRIORITY_MAX}."
    return Order(kind, window.key, window.text, until, priority)


def say_all(telling: Telling) -> str:
    counts, done = telling.counts, COMMANDS[telling.order.kind]
    parts = [f"{counts['applied']} {done}"]
    if counts["too_late"]:
        parts.append(f"{counts['too_late']} were already sent to an engine")
    if counts["gone"]:
        parts.append(f"{counts['gone']} had left the queue")
    said = [f"{', '.join(parts)}."]
    if counts["unanswered"]:
        said.append(f"Of {counts['unanswered']} no answer came in time; they may still be {done} within five seconds.")
    left = len(telling.found.ids) - telling.told
    if left:
        said.append(f"{'Redis is away: ' if telling.error else ''}{left} were not told.")
    if telling.found.missing:
        said.append("Not every gateway said what waits there; that was left alone.")
    return " ".join(said)


def priority_of(request: HttpRequest) -> int | None:
    given = request.POST.get("priority", "")
    return int(given) if given.isascii() and given.isdigit() and int(given) <= PRIORITY_MAX else None


def say(kind: str, outcome: dict[str, Any]) -> str:
    done = COMMANDS[kind]
    if not outcome["gateways"]:
        return f"No gateway answered in time. The requests may still be {done} within five seconds."
    parts = [f"{len(outcome['applied'])} {done}"]
    if outcome["too_late"]:
        parts.append(f"{len(outcome['too_late'])} were already sent to an engine")
    if outcome["gone"]:
        parts.append(f"{len(outcome['gone'])} had left the queue")
    return ", ".join(parts) + "."
