"""Base fields and the forms of SLO classes, priority mappings and searches. Every error belongs to a field.

Shares are entered as percent, times as seconds. Database constraints enforce the important rules again.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from django import forms
from django.utils.dateparse import parse_datetime
from django.utils.functional import cached_property

from controller.core.snapshot import LevelBounds
from controller.models import Decision, Tenant
from controller.models.base import NAME, Versioned
from controller.services.slo.priority_mappings import LEVELS_MAX, TIGHTER, tighter_than_above
from controller.services.slo.slo_classes import name_is_taken, name_taken
from controller.slo.mapping import CONTENTION_RULES
from controller.wording.values import REQUEST_TYPES

LONGEST_S = 86_400.0
SMALLEST_S = 0.0001
# Which minimum targets apply under each contention rule, short enough for a select.
MINIMUMS = {
    "strict": "Own minimum",
    "relax_to_next_higher": "Minimum of the next higher priority",
    "relax_to_zero": "No minimum",
}
# Far enough from the limits of datetime that a window around a moment, in any time zone, does not overflow.
EARLIEST, LATEST = datetime(1970, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)


class PositiveSecondsField(forms.FloatField):
    """Seconds, above zero and at most a day: a larger value is most likely milliseconds."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(min_value=SMALLEST_S, max_value=LONGEST_S, **kwargs)
        self.widget.attrs.update({"step": "any", "inputmode": "decimal"})
        self.unit = "s"


class PercentField(forms.FloatField):
    """Entered as 95, stored as 0.95."""

    def __init__(self, low: float = 0.0001, high: float = 100, **kwargs: Any) -> None:
        super().__init__(min_value=low, max_value=high, **kwargs)
        self.widget.attrs.update({"step": "any", "inputmode": "decimal"})
        self.unit = "%"

    def clean(self, value: Any) -> float | None:
        share = super().clean(value)
        return None if share is None else round(share / 100, 8)

    def prepare_value(self, value: Any) -> Any:
        return f"{value * 100:.6g}" if isinstance(value, float) else value


class TimeField(forms.DateTimeField):
    """A moment, sent and stored as UTC; `static/js/moments.js` shows and reads it in the browser's time zone.

    Labels end in "(UTC)", which holds without the script. Optional.
    """

    moment = True

    def __init__(self, **kwargs: Any) -> None:
        attrs = {"type": "datetime-local", "step": "1", "autocomplete": "off", "data-moment": ""}
        super().__init__(required=False, widget=forms.DateTimeInput(attrs=attrs, format="%Y-%m-%dT%H:%M:%S"), **kwargs)

    def prepare_value(self, value: Any) -> Any:
        """A URL may contain a time zone, which a datetime-local input does not accept."""
        try:
            named = parse_datetime(value) if isinstance(value, str) else None
            zoned = named is not None and named.tzinfo is not None
            return super().prepare_value(named if zoned else value)
        except (ValueError, OverflowError):
            return value

    def clean(self, value: Any) -> datetime | None:
        moment: datetime | None = super().clean(value)
        if moment is not None and not EARLIEST <= moment < LATEST:
            raise forms.ValidationError("Enter a date between 1970 and 2199.")
        return moment


class TenantChoice(forms.ModelChoiceField):
    """The tenant that owns a class; empty means all tenants."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(queryset=Tenant.objects.all(), required=False, empty_label="All tenants", **kwargs)


class EditForm(forms.Form):
    """Creates a row or, given `existing`, edits it. Then `version` is the one that the values were read from.

    FIXED: fields that cannot change once the row exists. CHANGEABLE: fields of the edit form.
    """

    version = forms.IntegerField(min_value=1, required=False, widget=forms.HiddenInput)

    FIXED: tuple[str, ...] = ()
    CHANGEABLE: tuple[str, ...] = ()

    def __init__(self, *args: Any, existing: Versioned | None = None, **kwargs: Any) -> None:
        if existing is not None:
            kwargs["initial"] = {name: getattr(existing, name) for name in (*self.CHANGEABLE, "version")}
        super().__init__(*args, **kwargs)
        if existing is not None:
            for name in self.FIXED:
                del self.fields[name]
            self.fields["version"].required = True

    def values(self) -> dict[str, Any]:
        """What a service takes: all values of a new row, or those of the edit form."""
        return {name: value for name, value in self.cleaned_data.items() if name != "version"}


class SLOClassForm(EditForm):
    """An SLO class. `name` and `tenant` cannot change once it exists: request records refer to them."""

    name = forms.CharField(
        max_length=64, validators=[NAME], help_text="Clients send it as slo_class. Cannot be changed later."
    )
    tenant = TenantChoice(help_text="A tenant's own class overrides the shared class of the same name.")
    title = forms.CharField(max_length=120, required=False, help_text="Shown next to the name.")
    ttft_s = PositiveSecondsField(label="TTFT", help_text="Time to first token, from arrival at the gateway.")
    tpot_s = PositiveSecondsField(label="TPOT", help_text="Mean time per output token after the first.")
    deadline_s = PositiveSecondsField(
        label="Deadline", required=False, help_text="For the whole answer, from arrival. Leave empty for no deadline."
    )
    waiting_time_s = PositiveSecondsField(
        label="Waiting time",
        help_text="A request that no instance has accepted by then fails with waiting_time_exceeded.",
    )
    target = PercentField(label="Attainment target", help_text="Share of requests that must meet all targets.")
    value = forms.FloatField(
        min_value=0.000_001, max_value=1_000_000, help_text="Value of one attained request, relative to other classes."
    )
    may_defer = forms.BooleanField(
        label="Deferrable",
        required=False,
        help_text="Requests that cannot meet their targets are served late instead of being refused.",
    )

    FIXED = ("name", "tenant")
    CHANGEABLE = ("title", "ttft_s", "tpot_s", "deadline_s", "waiting_time_s", "target", "value", "may_defer")

    def clean(self) -> dict[str, Any]:
        data = super().clean() or self.cleaned_data
        deadline, ttft = data.get("deadline_s"), data.get("ttft_s")
        if deadline is not None and ttft is not None and deadline < ttft:
            self.add_error("deadline_s", "The deadline must not be before the TTFT.")
        if data.keys() >= set(self.FIXED):
            self._check_name_is_free(data["name"], data["tenant"])
        return data

    def _check_name_is_free(self, name: str, tenant: Tenant | None) -> None:
        """The service checks this too, but only after all other fields are valid."""
        if name_is_taken(name, tenant):
            self.add_error("name", name_taken(tenant))


class LevelForm(forms.Form):
    """Targets of one priority: their initial values and the range they may move in."""

    ttft_s = PositiveSecondsField(label="Initial TTFT")
    ttft_min_s = PositiveSecondsField(label="Minimum TTFT")
    ttft_max_s = PositiveSecondsField(label="Maximum TTFT")
    tpot_s = PositiveSecondsField(label="Initial TPOT")
    tpot_min_s = PositiveSecondsField(label="Minimum TPOT")
    tpot_max_s = PositiveSecondsField(label="Maximum TPOT")

    def clean(self) -> dict[str, Any]:
        data = super().clean() or self.cleaned_data
        for kind in ("ttft", "tpot"):
            start, low, high = (data.get(f"{kind}{part}_s") for part in ("", "_min", "_max"))
            if low is not None and high is not None and low > high:
                self.add_error(f"{kind}_max_s", f"The maximum {kind.upper()} must not be below the minimum.")
            elif start is not None and low is not None and high is not None and not low <= start <= high:
                self.add_error(f"{kind}_s", f"The initial {kind.upper()} must be between the minimum and the maximum.")
        return data

    def level(self) -> dict[str, float]:
        return asdict(LevelBounds(**self.cleaned_data))


class BaseLevels(forms.BaseFormSet):
    """Targets must not be tighter than those of a higher priority (0 is the highest): the service's own rule."""

    @cached_property
    def forms(self) -> list[LevelForm]:
        """Stored levels are validated as entered ones are: they may have been saved before the rule existed."""
        levels: list[LevelForm] = super().forms
        if not self.is_bound:
            for place, name in tighter_than_above([level.initial for level in levels]):
                levels[place].errors[name] = levels[place].error_class([TIGHTER])
        return levels

    def clean(self) -> None:
        if any(self.errors):
            return
        # Find all of them first: add_error removes the value that the next level is compared with.
        for place, name in tighter_than_above([level.cleaned_data for level in self.forms]):
            self.forms[place].add_error(name, TIGHTER)


LevelFormSet = forms.formset_factory(
    LevelForm, formset=BaseLevels, extra=0, min_num=1, validate_min=True, max_num=LEVELS_MAX, validate_max=True
)


class MappingForm(EditForm):
    """The measurement window of a mapping, and which minimum targets apply."""

    window = forms.IntegerField(
        min_value=1,
        max_value=100_000,
        label="Requests in the window",
        help_text="Measurements are taken from this many recent requests.",
    )
    window_age_s = PositiveSecondsField(label="Maximum age", help_text="Older measurements are ignored.")
    contention = forms.ChoiceField(
        label="Minimum targets",
        choices=[(rule, MINIMUMS[rule]) for rule in CONTENTION_RULES],
        help_text="Applies while no request of a higher priority waits. Otherwise each priority uses its own minimum.",
    )

    CHANGEABLE = ("window", "window_age_s", "contention")


class RequestSearch(forms.Form):
    """Filters of the request list. Empty fields do not filter."""

    id = forms.CharField(max_length=64, required=False, label="ID")
    tenant = forms.CharField(max_length=64, required=False)
    slo_class = forms.CharField(max_length=64, required=False, label="Class")
    model = forms.CharField(max_length=120, required=False)
    instance = forms.CharField(max_length=64, required=False)
    workflow = forms.CharField(max_length=120, required=False)
    type = forms.ChoiceField(required=False, choices=[("", "any"), *REQUEST_TYPES.items()])
    outcome = forms.ChoiceField(
        required=False,
        choices=[("", "any"), *((name, name) for name in ("ok", "refused", "expired", "failed", "cut", "cancelled"))],
    )
    attained = forms.ChoiceField(
        required=False, label="SLO", choices=[("", "any"), ("yes", "attained"), ("no", "missed")]
    )
    since = TimeField(label="Arrived after (UTC)")
    until = TimeField(label="Arrived before (UTC)")


class WorkflowSearch(forms.Form):
    """Filters of the workflow list. Empty fields do not filter."""

    tenant = forms.CharField(max_length=64, required=False)
    state = forms.ChoiceField(
        required=False,
        choices=[
            ("", "any"),
            ("open", "open"),
            ("late", "deadline passed"),
            ("cancelled", "cancelled"),
            ("no_deadline", "no deadline"),
        ],
    )


class GoodputSearch(forms.Form):
    """Whose goodput, and of how long. An empty tenant is all of them."""

    tenant = forms.CharField(max_length=64, required=False)
    window = forms.ChoiceField(
        required=False, label="Period", choices=[("hour", "last hour"), ("day", "last 24 hours")]
    )


class AuditSearch(forms.Form):
    """Filters of the audit. Empty fields do not filter."""

    q = forms.CharField(max_length=120, required=False, label="Contains")
    kind = forms.CharField(max_length=64, required=False)
    actor = forms.CharField(max_length=150, required=False)
    actor_type = forms.ChoiceField(
        required=False, label="Actor type", choices=[("", "any"), *Decision.ActorType.choices]
    )
    subject_type = forms.CharField(max_length=32, required=False, label="Subject type")
    subject = forms.CharField(max_length=255, required=False)
    tenant = forms.CharField(max_length=64, required=False, label="Affects tenant")
    slo_class = forms.CharField(max_length=64, required=False, label="Affects class")
    since = TimeField(label="After (UTC)")
    until = TimeField(label="Before (UTC)")
