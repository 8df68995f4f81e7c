"""Tenants and API keys: quotas, usage, attainment; creating, rotating and revoking keys.

Viewers can read, admins can change.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from console.access import actor_of, allows
from console.forms.tenants import KeyForm, RotateForm, TenantForm
from console.forms.unsaved_forms import data_of
from console.live.live_view import open_by_tenant
from console.panels.history import goal_of, goals, links
from console.removed import says_if_removed
from console.views.accounts.secrets import rotated, secret_state, show_once
from console.views.editing import Difference, created, form_page, saved, say_updated, updated, written
from console.views.overview import read_fleets
from console.wording.budget import budget_words, error_budget
from controller.models import ApiKey, Tenant
from controller.selectors import catalogue
from controller.selectors.records import decisions, usage
from controller.selectors.records.attainment import attainment
from controller.selectors.roles import UserRole, role_of
from controller.services.slo.api_keys import NewKey, api_key_create, api_key_revoke, api_key_rotate
from controller.services.slo.tenants import tenant_create, tenant_update
from controller.wording.sentences import sentence
from controller.wording.values import VALUES
from controller.wording.vocabulary import class_name
from workers.notices import announce_config

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
QUOTA_NEAR = 0.8  # share of a quota used in the peak minute from which it is highlighted
CHANGES_SHOWN = 15
NO_PEAK = usage.Peak(0, 0)


@require_GET
@allows(UserRole.VIEWER)
def tenant_list(request: HttpRequest) -> HttpResponse:
    now = timezone.now()
    day = usage.usage_by_tenant(since=now - DAY, until=now)
    peaks = usage.peaks(since=now - HOUR, until=now)
    at_once = open_now()
    rows = [
        {
            "row": row,
            "day": day.get(row.name),
            "quotas": quotas(row, peaks.get(row.name, NO_PEAK)),
            "at_once": None if at_once is None else at_once.get(row.name, 0),
        }
        for row in usage.tenants_with_keys(now).order_by("name")
    ]
    return render(request, "console/accounts/tenants.html", {"tenants": rows, "may_change": may_change(request)})


@require_GET
@allows(UserRole.VIEWER)
@says_if_removed("tenant")
def tenant_detail(request: HttpRequest, tenant_id: int) -> HttpResponse:
    form = KeyForm(data_of(request, reverse("key-new", args=[tenant_id])))
    return render(request, "console/accounts/tenant.html", page_context(request, tenant_or_404(tenant_id), form))


@require_http_methods(["GET", "POST"])
@allows(UserRole.ADMIN)
def tenant_new(request: HttpRequest) -> HttpResponse:
    form = TenantForm(data_of(request))
    row = created(request, form, tenant_create, "Tenant {0.name} created. Create an API key to send requests.".format)
    if row is not None:
        return saved("tenant", row.pk)
    return form_page(request, "console/accounts/tenant_form.html", form)


@require_http_methods(["GET", "POST"])
@allows(UserRole.ADMIN)
@says_if_removed("tenant")
def tenant_edit(request: HttpRequest, tenant_id: int) -> HttpResponse:
    row = tenant_or_404(tenant_id)
    form = TenantForm(data_of(request), existing=row)
    conflict: list[Difference] = []
    if request.method == "POST" and form.is_valid():
        write = partial(tenant_update, actor=actor_of(request), tenant_id=row.pk)
        stored, conflict = updated(form, row, write)
        if stored is not None:
            say_updated(request, form, stored, f"Tenant {row.name} updated. Gateways use it within a second.")
            return saved("tenant", row.pk)
    return form_page(request, "console/accounts/tenant_form.html", form, conflict, row=row)


@require_POST
@allows(UserRole.ADMIN)
@says_if_removed("tenant")
def key_new(request: HttpRequest, tenant_id: int) -> HttpResponse:
    tenant = tenant_or_404(tenant_id)
    form = KeyForm(request.POST)
    if form.is_valid():
        made = written(form, lambda: api_key_create(actor=actor_of(request), tenant=tenant, **form.cleaned_data))
        if made is not None:
            return show_key(request, tenant, made)
    return render(request, "console/accounts/tenant.html", page_context(request, tenant, form), status=422)


@require_POST
@allows(UserRole.ADMIN)
@says_if_removed("api_key")
def key_rotate(request: HttpRequest, key_id: int) -> HttpResponse:
    key = get_object_or_404(catalogue.api_keys(), pk=key_id)
    form = RotateForm(request.POST)
    made = rotated(request, form, lambda: api_key_rotate(actor=actor_of(request), key_id=key.pk, grace=form.grace_s()))
    return redirect("tenant", key.tenant_id) if made is None else show_key(request, key.tenant, made, old=key)


@require_POST
@allows(UserRole.ADMIN)
@says_if_removed("api_key")
def key_revoke(request: HttpRequest, key_id: int) -> HttpResponse:
    key = get_object_or_404(catalogue.api_keys(), pk=key_id)
    was_revoked = key.revoked_at is not None
    api_key_revoke(actor=actor_of(request), key_id=key.pk)
    announce_config()
    said = "was already revoked" if was_revoked else "revoked. Gateways refuse it within a second"
    messages.success(request, f"Key {key.prefix}… ({key.name}) {said}.")
    return redirect("tenant", key.tenant_id)


def show_key(request: HttpRequest, tenant: Tenant, made: NewKey, old: ApiKey | None = None) -> HttpResponse:
    announce_config()
    return show_once(request, "console/accounts/key_made.html", made, old, tenant=tenant)


def tenant_or_404(tenant_id: int) -> Tenant:
    return get_object_or_404(catalogue.tenants(), pk=tenant_id)


def may_change(request: HttpRequest) -> bool:
    return role_of(request.user) >= UserRole.ADMIN


def page_context(request: HttpRequest, tenant: Tenant, key_form: KeyForm) -> dict[str, Any]:
    now = timezone.now()
    peak = usage.peaks(since=now - HOUR, until=now, tenant=tenant.name).get(tenant.name, NO_PEAK)
    at_once = open_now()
    return {
        "row": tenant,
        "division": VALUES["stage_deadlines"][tenant.stage_deadlines],
        "quotas": quotas(tenant, peak),
        "at_once": None if at_once is None else at_once.get(tenant.name, 0),
        "classes": class_rows(tenant, now),
        "keys": [(key, secret_state(key, now)) for key in usage.keys_of(tenant)],
        "key_form": key_form,
        "rotate_form": RotateForm(),
        "may_change": may_change(request),
        "changes": [(decision, sentence(decision)) for decision in decisions.about_tenant(tenant)[:CHANGES_SHOWN]],
    }


def quotas(tenant: Tenant, peak: usage.Peak) -> list[dict[str, Any]]:
    """Per-minute quotas with the peak usage of the last hour. Concurrent requests are shown live instead."""
    rows = (("Requests per minute", tenant.rpm, peak.requests), ("Tokens per minute", tenant.tpm, peak.tokens))
    return [
        {"name": name, "limit": limit, "used": used, "status": quota_status(limit, used)} for name, limit, used in rows
    ]


def open_now() -> dict[str, int] | None:
    """Concurrent requests by tenant, over all gateways; None while no gateway reports."""
    fleets = read_fleets()
    return open_by_tenant(fleets) if fleets else None


def quota_status(limit: int | None, used: int) -> str:
    if limit is None:
        return ""
    return "bad" if used >= limit else "warn" if used >= QUOTA_NEAR * limit else "ok"


def class_rows(tenant: Tenant, now: Any) -> list[dict[str, Any]]:
    """Attainment by class: last hour, last day, error budget, and a link to the misses."""
    known = goals(catalogue.slo_classes(), catalogue.priority_mappings())
    hour = {
        row.slo_class: row
        for row in attainment(since=now - HOUR, until=now, by=("slo_class",), tenant=tenant.name, quantiles=False)
    }
    rows = attainment(since=now - DAY, until=now, by=("slo_class",), tenant=tenant.name, quantiles=False)
    return [
        {
            "name": class_name(row.slo_class or ""),
            "day": row,
            "hour": (last := hour.get(row.slo_class)),
            "target": (target := goal_of(known, tenant.name, row.slo_class or "").target),
            "hour_budget": budget_words(last.finished, last.finished - last.attained, target) if last else "",
            **error_budget(row.finished, row.finished - row.attained, target),
            **links(tenant.name, row.slo_class or ""),
        }
        for row in rows
    ]
