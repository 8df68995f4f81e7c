"""Forms of tenants and their API keys. Every error belongs to a field."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.db.models import Q

from console.forms.base import EditForm, TimeField
from controller.models import ApiKey, SLOClass, Tenant
from controller.models.base import NAME

QUOTA_MAX = 2**31 - 1
# When the old key or token is revoked after a rotation, in seconds from then.
GRACE_S = {"0": "now", "3600": "in 1 hour", "86400": "in 1 day", "604800": "in 7 days"}


class QuotaField(forms.IntegerField):
    """A whole number above zero; empty means no limit."""

    def __init__(self, unit: str, **kwargs: Any) -> None:
        super().__init__(min_value=1, max_value=QUOTA_MAX, required=False, **kwargs)
        self.unit = unit


class ClassChoice(forms.ModelChoiceField):
    """The tenant's own classes and the shared ones, with the own ones marked."""

    def label_from_instance(self, row: SLOClass) -> str:
        return f"{row.name} (own)" if row.tenant_id else row.name


class TenantForm(EditForm):
    """A tenant, its default class and its quotas. `name` cannot change once it exists: records refer to it."""

    name = forms.CharField(
        max_length=64, validators=[NAME], help_text="Used in records and decisions. Cannot be changed later."
    )
    title = forms.CharField(max_length=120, required=False, help_text="Shown next to the name.")
    default_class = ClassChoice(
        queryset=SLOClass.objects.none(),
        required=False,
        empty_label="None (use the defaults)",
        help_text="For requests without a class or targets.",
    )
    rpm = QuotaField("requests/min", label="Requests per minute", help_text="Leave empty for no limit.")
    tpm = QuotaField(
        "tokens/min", label="Tokens per minute", help_text="Prompt and output tokens. Leave empty for no limit."
    )
    max_concurrency = QuotaField("requests", label="Concurrent requests", help_text="Leave empty for no limit.")
    state = forms.ChoiceField(
        choices=Tenant.State.choices, help_text="All keys of a suspended tenant are refused within a second."
    )

    FIXED = ("name",)
    CHANGEABLE = ("title", "default_class", "rpm", "tpm", "max_concurrency", "state")

    def __init__(self, *args: Any, existing: Tenant | None = None, **kwargs: Any) -> None:
        super().__init__(*args, existing=existing, **kwargs)
        owners = Q(tenant__isnull=True) | (Q(tenant=existing) if existing else Q(pk=None))
        self.fields["default_class"].queryset = SLOClass.objects.filter(owners)  # type: ignore[attr-defined]
        if existing is None:
            del self.fields["state"]


class KeyForm(forms.Form):
    """A new API key of a tenant."""

    name = forms.CharField(max_length=64, label="Key name", help_text="For example, where the key is used.")
    scopes = forms.MultipleChoiceField(
        choices=ApiKey.Scope.choices, widget=forms.CheckboxSelectMultiple, label="Scopes", initial=ApiKey.Scope.values
    )
    expires_at = TimeField(label="Expires (UTC)", help_text="Leave empty for no expiration.")


class RotateForm(forms.Form):
    """Rotation of an API key: when the old one is revoked. `incomplete`: the message if it is not valid."""

    incomplete = "Not rotated: choose when the old key is revoked."

    grace = forms.ChoiceField(choices=list(GRACE_S.items()), initial="3600", label="Revoke old key")

    def grace_s(self) -> timedelta:
        return timedelta(seconds=int(self.cleaned_data["grace"]))
