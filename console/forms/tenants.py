"""Forms of tenants and their keys. Every error names its field."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.db.models import Q

from console.forms.base import TimeField
from controller.models import ApiKey, SLOClass, Tenant
from controller.models.base import NAME

QUOTA_MAX = 2**31 - 1
# How long a rotated key goes on working beside its successor.
GRACE_S = {"0": "not at all", "3600": "for one hour", "86400": "for one day", "604800": "for seven days"}


class QuotaField(forms.IntegerField):
    """A whole number above zero; empty means no limit."""

    def __init__(self, unit: str, **kwargs: Any) -> None:
        super().__init__(min_value=1, max_value=QUOTA_MAX, required=False, **kwargs)
        self.unit = unit


class ClassChoice(forms.ModelChoiceField):
    """A tenant's own classes and the common ones, told apart."""

    def label_from_instance(self, row: SLOClass) -> str:  # type: ignore[override]
        return f"{row.name} (its own)" if row.tenant_id else row.name


class TenantForm(forms.Form):
    """A tenant's promise by default and its quotas. `name` is fixed once it exists: records carry it."""

    name = forms.CharField(max_length=64, validators=[NAME], help_text="In records and decisions; never changes.")
    title = forms.CharField(max_length=120, required=False, help_text="For people.")
    default_class = ClassChoice(
        queryset=SLOClass.objects.none(),
        required=False,
        empty_label="none: the common defaults",
        help_text="For requests that name no class and no targets.",
    )
    rpm = QuotaField("requests a minute", label="Requests a minute", help_text="Empty: no limit.")
    tpm = QuotaField("tokens a minute", label="Tokens a minute", help_text="Prompt and output. Empty: no limit.")
    max_concurrency = QuotaField("at once", label="Requests at once", help_text="Empty: no limit.")
    state = forms.ChoiceField(
        choices=Tenant.State.choices, help_text="Suspended: all its keys are refused within a second."
    )
    version = forms.IntegerField(min_value=1, required=False, widget=forms.HiddenInput)

    CHANGEABLE = ("title", "default_class", "rpm", "tpm", "max_concurrency", "state")

    def __init__(self, *args: Any, existing: Tenant | None = None, **kwargs: Any) -> None:
        if existing is not None:
            kwargs["initial"] = {name: getattr(existing, name) for name in (*self.CHANGEABLE, "version")}
        super().__init__(*args, **kwargs)
        owners = Q(tenant__isnull=True) | (Q(tenant=existing) if existing else Q(pk=None))
        self.fields["default_class"].queryset = SLOClass.objects.filter(owners)  # type: ignore[attr-defined]
        if existing is None:
            del self.fields["state"]
        else:
            del self.fields["name"]
            self.fields["version"].required = True

    def values(self) -> dict[str, Any]:
        """What a service takes: no version."""
        return {name: value for name, value in self.cleaned_data.items() if name != "version"}


class KeyForm(forms.Form):
    """A new key of one tenant."""

    name = forms.CharField(max_length=64, label="Name of the key", help_text="Where it is used, for people.")
    scopes = forms.MultipleChoiceField(
        choices=ApiKey.Scope.choices, widget=forms.CheckboxSelectMultiple, label="It may", initial=ApiKey.Scope.values
    )
    expires_at = TimeField(label="Expires (UTC)", help_text="Empty: never.")


class RotateForm(forms.Form):
    """A successor for a key."""

    grace = forms.ChoiceField(choices=list(GRACE_S.items()), initial="3600", label="The old key goes on working")

    def grace_s(self) -> timedelta:
        return timedelta(seconds=int(self.cleaned_data["grace"]))
