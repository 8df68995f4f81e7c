"""The form of a scaling policy. Loads: 1.0 is a fleet exactly full. Every error names its field."""

from __future__ import annotations

from typing import Any

from django import forms

from controller.models import ScalingPolicy, ServedModel
from controller.models.fleet import Role

INSTANCES_MAX = 1000
LOAD_MAX = 100.0
SECONDS_MAX = 86_400.0


class LoadField(forms.FloatField):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(min_value=0, max_value=LOAD_MAX, **kwargs)
        self.widget.attrs.update({"step": "any", "inputmode": "decimal"})


class PauseField(forms.FloatField):
    """Seconds, zero allowed."""

    def __init__(self, low: float = 0.0, high: float = SECONDS_MAX, **kwargs: Any) -> None:
        super().__init__(min_value=low, max_value=high, **kwargs)
        self.widget.attrs.update({"step": "any", "inputmode": "decimal"})
        self.unit = "s"


class ScalingForm(forms.Form):
    """Model and role are fixed once the policy exists."""

    model = forms.ModelChoiceField(queryset=ServedModel.objects.all())
    role = forms.ChoiceField(choices=Role.choices)
    enabled = forms.BooleanField(required=False, initial=True, label="Switched on")
    min_instances = forms.IntegerField(
        min_value=0, max_value=INSTANCES_MAX, initial=1, label="At least", help_text="Instances, whatever the load."
    )
    max_instances = forms.IntegerField(
        min_value=1, max_value=INSTANCES_MAX, initial=4, label="At most", help_text="Instances, whatever the load."
    )
    upper = LoadField(
        initial=0.8,
        label="Scale out above",
        help_text="Load: the largest of utilisation, wait over its SLO, and arrivals over what the fleet can finish.",
    )
    lower = LoadField(initial=0.3, label="Scale in below", help_text="Load; below the threshold for scaling out.")
    sustain_s = PauseField(initial=15.0, label="Low for", help_text="Load must stay low for so long.")
    cooldown_s = PauseField(initial=10.0, label="Pause after a change", help_text="Until it can have had an effect.")
    interval_s = PauseField(1.0, 60.0, initial=1.0, label="Time between two looks")
    warm = forms.IntegerField(
        min_value=0,
        max_value=INSTANCES_MAX,
        required=False,
        label="Warm beside",
        help_text="Instances whose process is up, without weights: a scale-out takes them first. They cost. Empty: as "
        "many as free devices allow.",
    )
    sleep_level = forms.TypedChoiceField(
        choices=[(0, "Stop it"), (1, "Sleep, weights in host memory"), (2, "Sleep, weights given up")],
        coerce=int,
        required=False,
        empty_value=0,  # type: ignore[arg-type]  # its stub knows text alone
        initial=0,
        label="Scale in by",
        help_text="One that sleeps keeps its process and is woken before a new one is started.",
    )
    version = forms.IntegerField(min_value=1, required=False, widget=forms.HiddenInput)

    CHANGEABLE = (
        "enabled", "min_instances", "max_instances", "upper", "lower", "sustain_s", "cooldown_s", "interval_s",
        "warm", "sleep_level",
    )  # fmt: skip

    def __init__(self, *args: Any, existing: ScalingPolicy | None = None, **kwargs: Any) -> None:
        if existing is not None:
            kwargs["initial"] = {name: getattr(existing, name) for name in (*self.CHANGEABLE, "version")}
        super().__init__(*args, **kwargs)
        if existing is not None:
            del self.fields["model"], self.fields["role"]
            self.fields["version"].required = True

    def clean(self) -> dict[str, Any]:
        data = super().clean() or self.cleaned_data
        low, high = data.get("min_instances"), data.get("max_instances")
        if low is not None and high is not None and low > high:
            self.add_error("max_instances", "Fewer than the least number of instances.")
        lower, upper = data.get("lower"), data.get("upper")
        if lower is not None and upper is not None and lower >= upper:
            self.add_error("lower", "Must lie below the threshold for scaling out.")
        if "model" in data and "role" in data:
            self._check_role_is_free(data["model"], data["role"])
        return data

    def _check_role_is_free(self, model: ServedModel, role: str) -> None:
        """The database says so too, but of no single field."""
        if ScalingPolicy.objects.filter(model=model, role=role).exists():
            self.add_error("role", f"There is a policy of {model.name} in this role already.")

    def values(self) -> dict[str, Any]:
        return {name: value for name, value in self.cleaned_data.items() if name != "version"}
