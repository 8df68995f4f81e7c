"""The live queue of all gateways, and commands on the requests in it.

Gateways publish their whole queue only on request, so a read waits up to `FIRST_LOOK_S` for them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from api.control.access.permissions import IsOperator
from api.control.framework.base import SIGNED_IN, ControlView
from api.control.framework.documented import operation
from api.control.framework.errors import LiveDataUnavailable
from api.control.framework.gateways import fresh_fleets
from controller.core.messages import QUEUE_ROWS_SHOWN, QueueRow, QueueState
from controller.postgres.waiting import give_back_connection
from controller.services.records.queue_commands import queue_command_outcome, queue_command_record
from workers import live

FIRST_LOOK_S = 1.5
LOOK_EVERY_S = 0.1
FRESH_S = 3.0  # the oldest queue shown for a gateway that does not respond in time
REQUESTS_MAX = 500
PRIORITY_MAX = 1_000


class QueueQuery(serializers.Serializer):
    """Which rows, and how many."""

    limit = serializers.IntegerField(min_value=1, max_value=QUEUE_ROWS_SHOWN, default=50)
    tenant = serializers.CharField(max_length=64, required=False)
    slo_class = serializers.CharField(max_length=64, required=False, allow_blank=True)


class QueueClass(serializers.Serializer):
    """Waiting requests of one class and tenant."""

    tenant = serializers.CharField()
    slo_class = serializers.CharField()
    count = serializers.IntegerField()
    oldest_slack_s = serializers.FloatField(allow_null=True)


class QueueRowOutput(serializers.Serializer):
    """One waiting request. Seconds; `slack_s` is the time left to its first-token deadline."""

    id = serializers.CharField()
    tenant = serializers.CharField()
    slo_class = serializers.CharField()
    model = serializers.CharField()
    priority = serializers.IntegerField()
    prompt_tokens = serializers.IntegerField()
    output_tokens = serializers.IntegerField(help_text="Number of output tokens that is expected.")
    waited_s = serializers.FloatField()
    ttft_s = serializers.FloatField(help_text="TTFT target.")
    slack_s = serializers.FloatField()
    hopeless = serializers.BooleanField()
    paused = serializers.BooleanField(help_text="Paused by an operator.")


class QueueOutput(serializers.Serializer):
    """The queue now. `items` are the most urgent; `total` and `by_class` count all."""

    at = serializers.FloatField(help_text="Epoch seconds of the oldest gateway's state.")
    gateways = serializers.IntegerField(help_text="Number of gateways whose queues are included.")
    missing = serializers.IntegerField(help_text="Gateways that did not publish their queue in time.")
    total = serializers.IntegerField()
    by_class = QueueClass(many=True)
    items = QueueRowOutput(many=True)


class LiveQueueView(ControlView):
    """Waiting requests, most urgent first."""

    access: ClassVar = {"GET": SIGNED_IN}

    @operation("queue", "The live queue", query=QueueQuery, answer=QueueOutput)
    def get(self, request: Request) -> Response:
        query = self.query(QueueQuery)
        expected = len(fresh_fleets())
        states = _look(expected)
        if not states:
            raise LiveDataUnavailable("No gateway has published its queue. Try again shortly.")
        if self.tenant_name is not None:
            states = [_of_tenant(state, self.tenant_name) for state in states]
        return Response(QueueOutput(_merged(states, query, expected)).data)


class _Chosen(serializers.Serializer):
    request_ids = serializers.ListField(
        child=serializers.CharField(max_length=64), min_length=1, max_length=REQUESTS_MAX
    )


class QueueSelection(_Chosen):
    """Waiting requests."""


class QueuePriority(_Chosen):
    """Waiting requests and their new priority."""

    priority = serializers.IntegerField(min_value=0, max_value=PRIORITY_MAX, help_text="0 is the highest.")


class CommandOutput(serializers.Serializer):
    """The outcome for each request, and the decision in the audit."""

    applied = serializers.ListField(child=serializers.CharField())
    too_late = serializers.ListField(child=serializers.CharField(), help_text="Already sent to an engine.")
    gone = serializers.ListField(child=serializers.CharField(), help_text="In no gateway's queue: ended, or unknown.")
    unanswered = serializers.ListField(
        child=serializers.CharField(),
        help_text="Maybe queued in a gateway that did not answer in time, which may still apply the command "
        "within 5 s.",
    )
    gateways = serializers.IntegerField(help_text="How many gateways answered.")
    decision = serializers.IntegerField(help_text="Id of the audit record.")


class _QueueCommand(ControlView):
    """Sends a command to every gateway and waits for the answers. It is audited whatever they are."""

    access: ClassVar = {"POST": IsOperator}
    configures = False

    def send(self, kind: str, data: dict[str, Any]) -> Response:
        ids, priority = list(dict.fromkeys(data["request_ids"])), data.get("priority")
        record = partial(queue_command_record, actor=self.actor, kind=kind, request_ids=ids, priority=priority)
        give_back_connection()
        try:
            answers = live.send_command(self.actor.name, kind, ids, priority)
        except live.AnswersLost as error:
            outcome = queue_command_outcome(ids, error.answers, complete=False)
            record(outcome={**outcome, "error": str(error)})
            message = "Redis failed during the command. It may have taken effect, or may still do so within 5 s."
            raise LiveDataUnavailable(message) from error
        except live.LiveUnavailable as error:
            record(outcome={"error": str(error)})
            raise
        outcome = queue_command_outcome(ids, answers, complete=bool(answers) and not answers.silent)
        decision = record(outcome=outcome)
        if not answers:
            raise LiveDataUnavailable("No gateway responded in time. The command may still take effect within 5 s.")
        return Response(CommandOutput({**outcome, "decision": decision.pk}).data)


class QueueCancel(_QueueCommand):
    """End requests that no engine has yet. Their clients get 499 `cancelled`."""

    @operation("queue_cancel", "Cancel waiting requests", body=QueueSelection, answer=CommandOutput)
    def post(self, request: Request) -> Response:
        return self.send("cancel", self.body(QueueSelection))


class QueueReprioritise(_QueueCommand):
    """Move requests in the queue: priority 0 is sent first, whatever its chances, and a larger number goes last."""

    @operation("queue_reprioritise", "Reprioritise waiting requests", body=QueuePriority, answer=CommandOutput)
    def post(self, request: Request) -> Response:
        return self.send("reprioritise", self.body(QueuePriority))


class QueuePause(_QueueCommand):
    """Pause requests until they are resumed or their waiting time ends."""

    @operation("queue_pause", "Pause waiting requests", body=QueueSelection, answer=CommandOutput)
    def post(self, request: Request) -> Response:
        return self.send("pause", self.body(QueueSelection))


class QueueResume(_QueueCommand):
    """Let paused requests be dispatched again."""

    @operation("queue_resume", "Resume paused requests", body=QueueSelection, answer=CommandOutput)
    def post(self, request: Request) -> Response:
        return self.send("resume", self.body(QueueSelection))


def _look(expected: int) -> list[QueueState]:
    """The current queues of the gateways, of which `expected` exist. For gateways that do not respond in time, their
    last queue if it is at most FRESH_S old."""
    give_back_connection()
    asked = live.ask_queue()
    give_up_at = time.monotonic() + FIRST_LOOK_S
    while True:
        states = live.read_queue()
        answered = [state for state in states if state["asked"] >= asked]
        if len(answered) >= expected:
            return answered
        if time.monotonic() >= give_up_at:
            return [state for state in states if time.time() - state["at"] <= FRESH_S]
        time.sleep(LOOK_EVERY_S)


def _of_tenant(state: QueueState, tenant: str) -> QueueState:
    """The rows of a gateway's queue that belong to the tenant."""
    return QueueState(**{**state, "rows": [row for row in state["rows"] if row["tenant"] == tenant]})


def _merged(states: Sequence[QueueState], query: dict[str, Any], expected: int) -> dict[str, Any]:
    """The answer for the queues of all gateways. Waiting times and slack are computed with each gateway's own clock."""
    chosen: dict[str, str] = {name: query[name] for name in ("tenant", "slo_class") if name in query}
    rows = [_aged(row, state["at"]) for state in states for row in state["rows"] if _is_chosen(row, chosen)]
    return {
        "at": min(state["at"] for state in states),
        "gateways": len(states),
        "missing": max(0, expected - len(states)),
        "total": len(rows),
        "by_class": _by_class(rows),
        "items": sorted(rows, key=lambda row: (row["slack_s"], row["id"]))[: query["limit"]],
    }


def _aged(row: QueueRow, at: float) -> dict[str, Any]:
    return {**row, "waited_s": max(0.0, at - row["arrived_at"]), "slack_s": row["due_at"] - at}


def _is_chosen(entry: Mapping[str, Any], chosen: Mapping[str, str]) -> bool:
    return all(entry[name] == value for name, value in chosen.items())


def _by_class(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["tenant"], row["slo_class"])
        known = found.setdefault(
            key, {"tenant": key[0], "slo_class": key[1], "count": 0, "oldest_slack_s": row["slack_s"]}
        )
        known["count"] += 1
        known["oldest_slack_s"] = min(known["oldest_slack_s"], row["slack_s"])
    return [found[key] for key in sorted(found)]
