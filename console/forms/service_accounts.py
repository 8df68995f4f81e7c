"""Forms of service accounts and their tokens."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms

from console.forms.base import EditForm
from console.forms.tenants import RotateForm
from controller.models import ServiceAccount
from controller.models.base import NAME

DAYS = {"30": "In 30 days", "90": "In 90 days", "365": "In 1 year"}


class ServiceAccountForm(EditForm):
    """`name` cannot change once it exists: decisions refer to it."""

    name = forms.CharField(max_length=64, validators=[NAME], help_text="Shown in the audit. Cannot be changed later.")
    title = forms.CharField(max_length=120, required=False, help_text="For example, what the program does.")
    role = forms.ChoiceField(
        choices=ServiceAccount.Role.choices, help_text="The most that the account may do, as for a person."
    )
    scopes = forms.MultipleChoiceField(
        choices=ServiceAccount.Scope.choices,
        widget=forms.CheckboxSelectMultiple,
        label="Scopes",
        initial=[ServiceAccount.Scope.READ],
        help_text="What the role applies to. Choose as few as the program needs.",
    )
    state = forms.ChoiceField(
        choices=ServiceAccount.State.choices, help_text="All tokens of a suspended account are refused at once."
    )

    FIXED = ("name",)
    CHANGEABLE = ("title", "role", "scopes", "state")

    def __init__(self, *args: Any, existing: ServiceAccount | None = None, **kwargs: Any) -> None:
        super().__init__(*args, existing=existing, **kwargs)
        if existing is None:
            del self.fields["state"]


class TokenForm(forms.Form):
    """A new token."""

    days = forms.ChoiceField(choices=list(DAYS.items()), initial="90", label="Expires")

    def lifetime(self) -> timedelta:
        return timedelta(days=int(self.cleaned_data["days"]))


class TokenRotateForm(RotateForm, TokenForm):
    """Rotation of a token: when the new one expires and when the old one is revoked."""

    incomplete = "Not rotated: choose when the new token expires and when the old one is revoked."

    days = forms.ChoiceField(choices=list(DAYS.items()), initial="90", widget=forms.HiddenInput)
