"""Queue page and the commands that act on what waits."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET, require_POST

from console.access import Role, allows
from controller.core.messages import CommandAnswer
from controller.services.actors import Actor
from controller.services.queue_commands import queue_command_record
from workers import live

REQUESTS_MAX = 500
COMMANDS = ("cancel",)


@require_GET
@allows(Role.VIEWER)
def queue(request: HttpRequest) -> HttpResponse:
    return render(request, "console/queue.html")


@require_POST
@allows(Role.OPERATOR)
def queue_command(request: HttpRequest) -> JsonResponse:
    """Tells every gateway, waits for the answers, records what came of it. Answers JSON for the page's script."""
    kind, ids = request.POST.get("kind", ""), request.POST.getlist("request")
    if kind not in COMMANDS:
        return JsonResponse({"message": f"Unknown command; known: {', '.join(COMMANDS)}."}, status=400)
    if not 1 <= len(ids) <= REQUESTS_MAX or any(len(each) > 64 for each in ids):
        return JsonResponse({"message": f"Choose 1 to {REQUESTS_MAX} requests."}, status=400)
    actor = Actor.person(request.user.get_username())
    try:
        answers = live.send_command(actor.name, kind, ids)
    except live.LiveUnavailable as error:
        queue_command_record(actor=actor, kind=kind, request_ids=ids, outcome={"error": str(error)})
        return JsonResponse({"message": "Redis is away: no gateway can be told. Nothing was cancelled."}, status=503)
    outcome = summary(ids, answers)
    queue_command_record(actor=actor, kind=kind, request_ids=ids, outcome=outcome)
    return JsonResponse({"message": say(outcome), **outcome}, status=200 if outcome["gateways"] else 503)


def summary(ids: list[str], answers: list[CommandAnswer]) -> dict[str, int]:
    """A request waits in one gateway only: what one of them applied is applied, though it is gone for the others."""
    applied = {each for answer in answers for each in answer["applied"]} & set(ids)
    too_late = ({each for answer in answers for each in answer["too_late"]} & set(ids)) - applied
    return {
        "applied": len(applied),
        "too_late": len(too_late),
        "gone": len(set(ids)) - len(applied) - len(too_late),
        "gateways": len(answers),
    }


def say(outcome: dict[str, int]) -> str:
    if not outcome["gateways"]:
        return "No gateway answered in time. The requests may still be cancelled within five seconds."
    parts = [f"{outcome['applied']} cancelled"]
    if outcome["too_late"]:
        parts.append(f"{outcome['too_late']} were already sent to an engine")
    if outcome["gone"]:
        parts.append(f"{outcome['gone']} had left the queue")
    return ", ".join(parts) + "."
