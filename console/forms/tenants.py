"""Forms of tenants and their API keys. Every error belongs to a field."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django import forms
from django.db.models import Q

from console.forms.base import EditForm, PercentField, PositiveSecondsField, TimeField
from controller.models import ApiKey, ServedModel, SLOClass, Tenant
from controller.models.base import NAME
from controller.models.tenants import LONGEST_RETENTION_S, LOWEST_PRIORITY
from controller.services.slo.tenants import EDITABLE, quotas_of_new_tenants
from controller.slo.stage_deadlines import LIVE_RULE
from controller.wording.values import VALUES

QUOTA_MAX = 2**31 - 1
# When the old key or token is revoked after a rotation, in seconds from then.
GRACE_S = {"0": "now", "3600": "in 1 hour", "86400": "in 1 day", "604800": "in 7 days"}


class WholeNumberField(forms.IntegerField):
    """A whole number, above zero unless `low` says otherwise. May be empty."""

    def __init__(self, unit: str, low: int = 1, high: int = QUOTA_MAX, **kwargs: Any) -> None:
        super().__init__(min_value=low, max_value=high, required=False, **kwargs)
        self.unit = unit


class ClassChoice(forms.ModelChoiceField):
    """The tenant's own classes and the shared ones, with the own ones marked."""

    def label_from_instance(self, row: SLOClass) -> str:
        return f"{row.name} (own)" if row.tenant_id else row.name


class NamesField(forms.MultipleChoiceField):
    """Names to choose from, besides those that are stored; none chosen means that all are allowed."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(widget=forms.CheckboxSelectMultiple, required=False, **kwargs)

    def offer(self, names: Iterable[str], stored: Iterable[str]) -> None:
        """Stored names of what was removed meanwhile stay, so that saving does not change what is allowed."""
        self.choices = [(name, name) for name in sorted({*names, *stored})]


class TenantForm(EditForm):
    """A tenant, its default class, quotas and entitlements. `name` cannot change once it exists: records refer to
    it."""

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
    rpm = WholeNumberField("requests/min", label="Requests per minute", help_text="Leave empty for no limit.")
    tpm = WholeNumberField(
        "tokens/min", label="Tokens per minute", help_text="Prompt and output tokens. Leave empty for no limit."
    )
    max_concurrency = WholeNumberField("requests", label="Concurrent requests", help_text="Leave empty for no limit.")
    queue_share = PercentField(
        low=0.1,
        required=False,
        label="Share of the queue",
        help_text="The most it may have of a gateway's open requests and of their bytes. Leave empty for the default.",
    )
    allowed_classes = NamesField(
        label="Allowed SLO classes", help_text="Classes that its requests may name. Choose none to allow all."
    )
    allowed_models = NamesField(
        label="Allowed models", help_text="Models that its requests may use. Choose none to allow all."
    )
    highest_priority = forms.IntegerField(
        min_value=0,
        max_value=LOWEST_PRIORITY,
        required=False,
        initial=0,
        label="Highest priority",
        help_text="The smallest priority number that its requests may name. 0 is the highest priority and allows all.",
    )
    tightest_ttft_s = PositiveSecondsField(
        required=False,
        label="Tightest TTFT",
        help_text="The smallest target_ttft that a request may name itself. Leave empty to allow any.",
    )
    tightest_tpot_s = PositiveSecondsField(
        required=False,
        label="Tightest TPOT",
        help_text="The smallest target_tbt that a request may name itself. Leave empty to allow any.",
    )
    tightest_deadline_s = PositiveSecondsField(
        required=False,
        label="Tightest deadline",
        help_text="The smallest deadline that a request may name itself. Leave empty to allow any.",
    )
    retention_s = WholeNumberField(
        "s",
        low=0,
        high=LONGEST_RETENTION_S,
        initial=0,
        label="Retention of answers",
        help_text="How long answers of requests with a step key, and responses with their conversations (unless the "
        "client says store false), are kept as text. 0 keeps none.",
    )
    stage_deadlines = forms.ChoiceField(
        choices=[(rule, VALUES["stage_deadlines"][rule]) for rule in (LIVE_RULE, "accumulated", "own_share")],
        initial=LIVE_RULE,
        required=False,
        label="Division of deadlines",
        help_text="How the deadline of a workflow is divided among its stages. Example: stages of 2, 3 and 5 s, a "
        "deadline of 20 s, and a first stage that ends after 6 s instead of 4. The second stage is due at 11.25 s by "
        "shares of the time left, at 10 s by fixed due times, and at 12 s by fixed lengths.",
    )
    state = forms.ChoiceField(
        choices=Tenant.State.choices, help_text="All keys of a suspended tenant are refused within a second."
    )

    FIXED = ("name",)
    CHANGEABLE = EDITABLE

    def __init__(self, *args: Any, existing: Tenant | None = None, **kwargs: Any) -> None:
        super().__init__(*args, existing=existing, **kwargs)
        owners = Q(tenant__isnull=True) | (Q(tenant=existing) if existing else Q(pk=None))
        self.fields["default_class"].queryset = SLOClass.objects.filter(owners)  # type: ignore[attr-defined]
        classes = SLOClass.objects.filter(owners).values_list("name", flat=True)
        self._offer("allowed_classes", classes, existing)
        self._offer("allowed_models", ServedModel.objects.values_list("name", flat=True), existing)
        if existing is None:
            for name, value in quotas_of_new_tenants().items():
                self.fields[name].initial = value
            del self.fields["state"]

    def clean_highest_priority(self) -> int:
        return self.cleaned_data["highest_priority"] or 0

    def clean_retention_s(self) -> int:
        return self.cleaned_data["retention_s"] or 0

    def clean_stage_deadlines(self) -> str:
        chosen: str = self.cleaned_data["stage_deadlines"]
        return chosen or str(self.initial.get("stage_deadlines", LIVE_RULE))

    def _offer(self, field: str, names: Iterable[str], existing: Tenant | None) -> None:
        choice = self.fields[field]
        assert isinstance(choice, NamesField)
        choice.offer(names, getattr(existing, field) if existing else ())


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
