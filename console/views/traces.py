"""Traces: list, upload, remove."""

from __future__ import annotations

from django import forms
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_http_methods, require_POST

from console.access import allows, refuse
from console.views.configuration.classes import show_errors
from controller.models import Trace
from controller.selectors.experiments import results as experiments
from controller.selectors.roles import UserRole, role_of
from controller.services.actors import Actor
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
        try:
            content = form.cleaned_data["file"].read(BYTES_MAX + 1)
            row = trace_create(
                actor=Actor.person(request.user.get_username()), name=form.cleaned_data["name"], content=content
            )
        except ValidationError as error:
            show_errors(form, error)
        else:
            messages.success(
                request, f"Trace {row.name} uploaded with {row.requests:,} request{'' if row.requests == 1 else 's'}."
            )
            return redirect("traces")
    context = {"form": form, "traces": experiments.traces()[:SHOWN]}
    return render(request, "console/traces.html", context, status=422 if form.errors else 200)


@require_POST
@allows(UserRole.OPERATOR)
def trace_delete(request: HttpRequest, slug: str) -> HttpResponse:
    try:
        trace_remove(actor=Actor.person(request.user.get_username()), slug=slug)
    except Trace.DoesNotExist:
        raise Http404(f"no trace {slug}") from None
    except ValidationError as error:
        messages.error(request, " ".join(error.messages))
    else:
        messages.success(request, "Trace removed.")
    return redirect("traces")
