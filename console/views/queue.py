"""Queue page and the commands that act on what waits."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET, require_POST

from console.access import allows
from controller.selectors.roles import Role
from controller.services.actors import Actor
from controller.services.queue_commands import queue_command_outcome, queue_command_record
from workers import live

REQUESTS_MAX = 500
PRIORITY_MAX = 1000
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
