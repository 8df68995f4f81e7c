"""UI components: every component of the console in each of its states, with made-up data."""

from __future__ import annotations

from typing import Any

from django import forms
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_GET

from console.access import allows
from console.charts import base as charts
from console.forms.base import PercentField, PositiveSecondsField
from console.panels.timeline import timeline
from console.views.editing import Difference
from console.views.overview import instance_card
from controller.core.types import Outcome
from controller.models import RequestRecord
from controller.selectors.roles import UserRole

TOKENS = ("bg", "surface", "surface-2", "ink", "ink-2", "ink-3", "line", "accent", "ok", "warn", "bad", "idle", "focus")
STEPS = [
    {
        "kind": "slo", "reason": "class", "at": 0.0, "what": "Targets set", "why": "from its SLO class",
        "figures": {"ttft_s": 0.5},
    },
    {
        "kind": "dispatch", "reason": "fits_budget", "at": 0.12, "what": "Dispatched",
        "why": "fits within the instance's token budget", "figures": {"slack_s": 0.38, "queued": 4},
        "rejected": {"engine-2": "7 outstanding, 900 tokens waiting"},
    },
]  # fmt: skip
CLASS_ROW = {
    "key": "acme/chat", "series_class": 1, "name": "chat", "tenant": "acme", "status": "warn", "status_text": "at risk",
    "attainment": 0.953, "target": 0.95, "finished": 269, "hour": 0.961, "day": 0.957, "budget_text": "14 % left",
    "budget_status": "warn", "budget_share": 0.14, "queued": 12, "oldest_slack_s": 0.21, "ttft_p50_s": 0.18,
    "ttft_p95_s": 0.46, "ttft_counted": "264 of 269 requests; 5 not served", "ttft_target_s": 0.5,
    "why": "waited too long in the queue", "requests_url": "#class-title", "decisions_url": "#class-title",
}  # fmt: skip
QUEUE_ROWS = [
    {"id": "req-in-time", "slack": "420 ms left", "status": "ok", "share": 0.84, "starts": "in 90 ms"},
    {"id": "req-nearly-late", "slack": "80 ms left", "status": "warn", "share": 0.16, "starts": "in 40 ms"},
    {
        "id": "req-late", "slack": "1.20 s late", "status": "bad", "share": 1, "starts": "too late", "miss": True,
        "late": True, "ends": "times out in 2.80 s",
    },
    {
        "id": "req-paused", "slack": "300 ms left", "status": "ok", "share": 0.6, "paused": True,
        "ends": "times out in 4.30 s",
    },
]  # fmt: skip
INSTANCES = [
    {"id": "engine-1", "role": "collocated", "state": "up", "utilisation": 0.4, "running": 3, "waiting": 0},
    {"id": "engine-2", "role": "decode", "state": "up", "utilisation": 0.97, "running": 8, "waiting": 4},
    {"id": "engine-3", "role": "prefill", "state": "down", "utilisation": 0.0, "running": 0, "waiting": 0},
]
SENTENCES = [
    "scaler scaled out demo/collocated: load 125 % is above 80 % with 2 ready",
    "olga changed SLO class chat",
]
CONFLICT = [Difference("TTFT", "0.5 s", "0.4 s"), Difference("Attainment target", "95 %", "97 %")]


class PatternExample(forms.Form):
    """One field of each kind."""

    text = forms.CharField(max_length=40, help_text="Help explains what a value does.", initial="interactive")
    seconds = PositiveSecondsField(label="Duration", initial=0.5)
    percent = PercentField(label="Share", initial=0.95)
    choice = forms.ChoiceField(choices=[("a", "First option"), ("b", "Second option")])
    tick = forms.BooleanField(required=False, label="Checkbox", initial=True)
    several = forms.MultipleChoiceField(
        choices=[("a", "First option"), ("b", "Second option")],
        widget=forms.CheckboxSelectMultiple,
        label="Multiple choice",
    )


@require_GET
@allows(UserRole.VIEWER)
def patterns(request: HttpRequest) -> HttpResponse:
    now = timezone.now()
    wrong = PatternExample({"text": "", "seconds": "-1", "percent": "200", "choice": "c"})
    wrong.is_valid()
    at = now.timestamp()
    minutes = [
        charts.Minute(at - 60 * ago, "acme/chat", "chat · acme", 20, 20 - ago % 4, 1200 + 30 * ago)
        for ago in range(30, 0, -1)
    ]
    window = (at - 1800, at)
    context: dict[str, Any] = {
        "now": now,
        "tokens": TOKENS,
        "form": PatternExample(),
        "wrong": wrong,
        "timeline": timeline(sample_record(now)),
        "steps": STEPS,
        "class_row": CLASS_ROW,
        "queue_rows": [{"ttft_s": 0.5, "waited_s": 0.2, "priority": "–", **row} for row in QUEUE_ROWS],
        "instances": [instance_card({"model": "demo", **each}) for each in INSTANCES],
        "decisions": [{"at": now, "sentence": sentence, "figures_text": ""} for sentence in SENTENCES],
        "conflict": CONFLICT,
        "charts": {
            "attainment": charts.attainment(minutes, {"acme/chat": 0}, {"acme/chat": 0.95}, *window),
            "nothing": charts.goodput([], {}, *window),
        },
    }
    return render(request, "console/site/patterns.html", context)


def sample_record(now: Any) -> RequestRecord:
    """An unsaved record of a request whose fourth token was late."""
    return RequestRecord(
        id="sample", arrived_at=now, tenant="acme", slo_class="chat", model="demo", outcome=Outcome.OK.value,
        http_status=200, streamed=True, judged_by="tokens", prompt_tokens=120, output_tokens=16, target_ttft_s=0.5,
        target_tpot_s=0.05, target_deadline_s=1.6, waiting_time_s=1.0, queue_s=0.12, ttft_s=0.42, tpot_s=0.06,
        e2e_s=1.32, ttft_met=True, tpot_met=False, deadline_met=True, attained=False, goodput_tokens=9, attempts=1,
        decisions=STEPS, token_times=[0.42, 0.47, 0.72, 0.85, 1.32],
    )  # fmt: skip
