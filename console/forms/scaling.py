"""The form of a scaling policy. Loads are entered in percent of capacity. Every error belongs to a field."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.utils import timezone

from console.forms.base import EditForm, PercentField
from controller.models import ScalingPolicy, ServedModel
from controller.models.fleet import Role
from controller.services.fleet.scaling_policies import HELD_MAX

INSTANCES_MAX = 1000
LOAD_MAX = 10_000  # percent
SECONDS_MAX = 86_400.0


class LoadField(PercentField):
    """Entered as 80, stored as 0.8; above 100 % requests wait."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(low=0, high=LOAD_MAX, **kwargs)


class PauseField(forms.FloatField):
    """Seconds, zero allowed."""

    def __init__(self, low: float = 0.0, high: float = SECONDS_MAX, **kwargs: Any) -> None:
        super().__init__(min_value=low, max_value=high, **kwargs)
        self.widget.attrs.update({"step": "any", "inputmode": "decimal"})
        self.unit = "s"


class ScalingForm(EditForm):
    """Model and role cannot change once the policy exists."""

    model = forms.ModelChoiceField(queryset=ServedModel.objects.all())
    role = forms.ChoiceField(choices=[(role.value, role.value) for role in Role])
    enabled = forms.BooleanField(required=False, initial=True, label="Enabled")
    min_instances = forms.IntegerField(
        min_value=0, max_value=INSTANCES_MAX, initial=1, label="Minimum instances", help_text="Kept at any load."
    )
    max_instances = forms.IntegerField(
        min_value=1, max_value=INSTANCES_MAX, initial=4, label="Maximum instances", help_text="Never exceeded."
    )
    upper = LoadField(
        initial=0.8,
        label="Scale out above",
        help_text="Load: the highest of utilisation, waiting time over its target, and arrival rate over service rate.",
    )
    lower = LoadField(initial=0.3, label="Scale in below", help_text="Must be less than the scale-out threshold.")
    sustain_s = PauseField(
        initial=15.0,
        label="Scale in after",
        help_text="How long the load must stay below the threshold; at least as long as a start takes.",
    )
    cooldown_s = PauseField(initial=10.0, label="Cooldown", help_text="Minimum time between two changes.")
    interval_s = PauseField(1.0, 60.0, initial=1.0, label="Evaluation interval")
    warm = forms.IntegerField(
        min_value=0,
        max_value=INSTANCES_MAX,
        required=False,
        label="Warm spares",
        help_text="Instances kept running without weights, used first to scale out. They count toward cost. Leave "
        "empty for as many as free devices allow.",
    )
    sleep_level = forms.TypedChoiceField(
        choices=[(0, "Stop"), (1, "Sleep, keep weights in host memory"), (2, "Sleep, discard weights")],
        coerce=int,
        required=False,
        empty_value=0,  # type: ignore[arg-type]  # its stub knows text alone
        initial=0,
        label="Scale-in action",
        help_text="A sleeping instance keeps its process and is woken before a new one is started.",
    )

    FIXED = ("model", "role")
    CHANGEABLE = (
        "enabled", "min_instances", "max_instances", "upper", "lower", "sustain_s", "cooldown_s", "interval_s",
        "warm", "sleep_level",
    )  # fmt: skip

    def clean(self) -> dict[str, Any]:
        data = super().clean() or self.cleaned_data
        low, high = data.get("min_instances"), data.get("max_instances")
        if low is not None and high is not None and low > high:
            self.add_error("max_instances", "The maximum must not be less than the minimum.")
        lower, upper = data.get("lower"), data.get("upper")
        if lower is not None and upper is not None and lower >= upper:
            self.add_error("lower", "Must be less than the scale-out threshold.")
        if "model" in data and "role" in data:
            self._check_role_is_free(data["model"], data["role"])
        return data

    def _check_role_is_free(self, model: ServedModel, role: str) -> None:
        """The database checks this too, but its error belongs to no field."""
        if ScalingPolicy.objects.filter(model=model, role=role).exists():
            self.add_error("role", f"{model.name} already has a policy for this role.")


class HoldForm(EditForm):
    """How many instances by hand, for how long and why."""

    instances = forms.IntegerField(
        min_value=1, max_value=HELD_MAX, help_text="The scaler keeps exactly this many, whatever the load."
    )
    hours = forms.TypedChoiceField(
        label="For",
        coerce=float,
        initial="1.0",
        choices=[
            ("0.25", "15 minutes"),
            ("1.0", "1 hour"),
            ("4.0", "4 hours"),
            ("24.0", "24 hours"),
            ("168.0", "7 days"),
        ],
        help_text="After that it scales by load again.",
    )
    reason = forms.CharField(max_length=200, help_text="Shown on the page Scaling and in the audit.")

    def __init__(self, *args: Any, existing: ScalingPolicy, **kwargs: Any) -> None:
        super().__init__(*args, existing=existing, **kwargs)
        self.initial["instances"] = existing.held(timezone.now())

    def values(self) -> dict[str, Any]:
        """What `scaling_policy_hold` takes."""
        values = super().values()
        return values | {"until": timezone.now() + timedelta(hours=values.pop("hours"))}
