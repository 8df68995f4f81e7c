"""Traces: list, upload, remove."""

from __future__ import annotations

from django import forms
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.views.decorators.http import require_http_methods, require_POST

from console.access import actor_of, allows, refuse
from console.views.editing import form_page, written
from controller.models import Trace
from controller.selectors.experiments import results as experiments
from controller.selectors.roles import UserRole, role_of
from controller.services.experiments.traces import BYTES_MAX, trace_create, trace_remove

SHOWN = 200


class TraceForm(forms.Form):
    """A CSV file and its name."""

    name = forms.CharField(max_length=120)
    file = forms.FileField(
        help_text="CSV, optionally gzipped: input_tokens, output_tokens; optional arrival_s, session, prefix_hashes.",
        widget=forms.ClearableFileInput(attrs={"accept": ".csv,.gz,text/csv,application/gzip"}),
    )


@require_http_methods(["GET", "POST"])
@allows(UserRole.VIEWER)
def trace_list(request: HttpRequest) -> HttpResponse:
    role = role_of(request.user)
    if request.method == "POST" and role < UserRole.OPERATOR:
        refuse(request, role, UserRole.OPERATOR)
    form = TraceForm(request.POST or None, request.FILES or None)
    if request.method == "POST" and form.is_valid():
        content = form.cleaned_data["file"].read(BYTES_MAX + 1)
        name = form.cleaned_data["name"]
        row = written(form, lambda: trace_create(actor=actor_of(request), name=name, content=content))
        if row is not None:
            messages.success(
                request, f"Trace {row.name} uploaded with {row.requests:,} request{'' if row.requests == 1 else 's'}."
            )
            return redirect("traces")
    return form_page(request, "console/traffic/traces.html", form, traces=experiments.traces()[:SHOWN])


@require_POST
@allows(UserRole.OPERATOR)
def trace_delete(request: HttpRequest, slug: str) -> HttpResponse:
    try:
        trace_remove(actor=actor_of(request), slug=slug)
    except Trace.DoesNotExist:
        raise Http404(f"no trace {slug}") from None
    except ValidationError as error:
        messages.error(request, " ".join(error.messages))
    else:
        messages.success(request, "Trace removed.")
    return redirect("traces")
