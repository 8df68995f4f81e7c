"""The form of the flow settings."""

from __future__ import annotations

import json
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.forms.fields import InvalidJSONInput

from console.forms.base import EditForm, PercentField
from controller.core.policy import ORDERINGS
from controller.flow.gate import GATED, OFF
from controller.services.slo.flow_settings import LONGEST_OPTIONS
from controller.wording.values import VALUES


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


class OptionsField(forms.JSONField):
    """Of at most LONGEST_OPTIONS characters. Django's own raises other errors than ValidationError for long numbers
    and deep nesting, and passes half of a surrogate pair, which no page can show."""

    def to_python(self, value: Any) -> Any:
        if isinstance(value, str) and len(value) > LONGEST_OPTIONS:
            raise ValidationError(f"Enter at most {LONGEST_OPTIONS} characters.", code="max_length")
        try:
            found = super().to_python(value)
            json.dumps(found, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            raise ValidationError(self.error_messages["invalid"], code="invalid") from None
        return found

    def bound_data(self, data: Any, initial: Any) -> Any:
        """What is wrong is shown again as it was entered."""
        try:
            self.to_python(data)
        except ValidationError:
            return InvalidJSONInput(data)
        return super().bound_data(data, initial)


class FlowSettingsForm(EditForm):
    flow_policy = forms.ChoiceField(
        label="Flow policy",
        choices=[(name, _sentence(VALUES["flow_policy"][name])) for name in (OFF, *GATED)],
        help_text="Which transfers may send first on a host's link. Transfers in flight end as they began.",
    )

    drop_budget = PercentField(
        low=0,
        label="Drop budget",
        help_text=(
            "Largest share of the waiting requests that may be pruned at a time: served last, so that the others are "
            "in time. Requests are pruned where they wait at several gateways, or for a link whose transfers are "
            "ordered. 0 prunes nothing."
        ),
    )

    ordering = forms.ChoiceField(
        required=False,
        label="Ordering of waiting requests",
        choices=[("", "As each gateway was started"), *((name, name) for name in ORDERINGS)],
        help_text="In which order gateways consider waiting requests. A change ranks everything that waits anew.",
    )
    ordering_options = OptionsField(
        required=False,
        label="Options of the ordering",
        widget=forms.Textarea(attrs={"rows": 3, "spellcheck": "false"}),
        help_text='A JSON object with the options that differ, such as {"frame_steps": 100}. All are listed below.',
    )

    CHANGEABLE = ("flow_policy", "drop_budget", "ordering", "ordering_options")

    def clean_ordering_options(self) -> Any:
        given = self.cleaned_data["ordering_options"]
        return {} if given is None else given
