"""The form of the flow settings."""

from __future__ import annotations

from django import forms

from console.forms.base import EditForm, PercentField
from controller.flow.gate import GATED, OFF
from controller.wording.values import VALUES


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


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
            "in time. Requests are pruned only where they wait at several gateways. 0 prunes nothing."
        ),
    )

    CHANGEABLE = ("flow_policy", "drop_budget")
