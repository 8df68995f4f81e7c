"""Patterns: every component of the console once, in each of its states, with made-up figures said to be so."""

from __future__ import annotations

from typing import Any

from django import forms
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_GET

from console import charts
from console.access import allows
from console.forms import PercentField, SecondsField
from console.timeline import timeline
from controller.core.types import Outcome
from controller.models import RequestRecord
from controller.selectors.roles import Role

TOKENS = ("bg", "surface", "surface-2", "ink", "ink-2", "ink-3", "line", "accent", "ok", "warn", "bad", "idle", "focus")
STEPS = [
    {
        "kind": "slo", "reason": "class", "at": 0.0, "what": "Targets", "why": "those of its class",
        "figures": {"ttft_s": 0.5},
    },
    {
        "kind": "dispatch", "reason": "fits_budget", "at": 0.12, "what": "Sent to an engine",
        "why": "fits the engine's room for more", "figures": {"slack_s": 0.38, "queued": 4},
        "rejected": {"engine-2": "7 outstanding, 900 tokens waiting"},
    },
]  # fmt: skip


class Sample(forms.Form):
    """One field of each kind."""

    text = forms.CharField(max_length=40, help_text="Help says what a value does.", initial="interactive")
    seconds = SecondsField(label="A time", initial=0.5)
    percent = PercentField(label="A share", initial=0.95)
    choice = forms.ChoiceField(choices=[("a", "One of several"), ("b", "Another")])
    tick = forms.BooleanField(required=False, label="Yes or no", initial=True)
    several = forms.MultipleChoiceField(
        choices=[("a", "This"), ("b", "and that")], widget=forms.CheckboxSelectMultiple, label="Some of several"
    )


@require_GET
@allows(Role.VIEWER)
def patterns(request: HttpRequest) -> HttpResponse:
    now = timezone.now()
    wrong = Sample({"text": "", "seconds": "-1", "percent": "200", "choice": "c"})
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
        "form": Sample(),
        "wrong": wrong,
        "timeline": timeline(sample_record(now)),
        "steps": STEPS,
        "charts": {
            "attainment": charts.attainment(minutes, {"acme/chat": 0}, {"acme/chat": 0.95}, *window),
            "nothing": charts.goodput([], {}, *window),
        },
    }
    return render(request, "console/patterns.html", context)


def sample_record(now: Any) -> RequestRecord:
    """Not stored: a request whose fourth token came late."""
    return RequestRecord(
        id="sample", arrived_at=now, tenant="acme", slo_class="chat", model="demo", outcome=Outcome.OK.value,
        http_status=200, streamed=True, judged_by="tokens", prompt_tokens=120, output_tokens=16, target_ttft_s=0.5,
        target_tpot_s=0.05, target_deadline_s=1.6, waiting_time_s=1.0, queue_s=0.12, ttft_s=0.42, tpot_s=0.06,
        e2e_s=1.32, ttft_met=True, tpot_met=False, deadline_met=True, attained=False, goodput_tokens=9, attempts=1,
        decisions=STEPS, token_times=[0.42, 0.47, 0.72, 0.85, 1.32],
    )  # fmt: skip
