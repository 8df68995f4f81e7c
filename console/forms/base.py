"""What people may type into the console, checked before any service sees it. Every error names its field.

Shares are typed as percent, times as seconds. The database's own constraints repeat what matters.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from django import forms
from django.utils.dateparse import parse_datetime
from django.utils.functional import cached_property

from controller.core.snapshot import LevelBounds
from controller.models import Decision, PriorityMapping, SLOClass, Tenant
from controller.models.base import NAME
from controller.services.priority_mappings import LEVELS_MAX, TIGHTER, tighter_than_above
from controller.services.slo_classes import name_is_taken, name_taken
from controller.slo.mapping import CONTENTION_RULES
from controller.wording.figure_names import VALUES

LONGEST_S = 86_400.0
SMALLEST_S = 0.0001
# What a moment may be: windows around it stay within the calendar, zones too.
EARLIEST, LATEST = datetime(1970, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)


class SecondsField(forms.FloatField):
    """A time in seconds, above zero and at most a day: larger values are mistakes of unit."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(min_value=SMALLEST_S, max_value=LONGEST_S, **kwargs)
        self.widget.attrs.update({"step": "any", "inputmode": "decimal"})
        self.unit = "s"


class PercentField(forms.FloatField):
    """Typed as 95, kept as 0.95."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(min_value=0.0001, max_value=100, **kwargs)
        self.widget.attrs.update({"step": "any", "inputmode": "decimal"})
        self.unit = "%"

    def clean(self, value: Any) -> float | None:
        share = super().clean(value)
        return None if share is None else round(share / 100, 8)

    def prepare_value(self, value: Any) -> Any:
        return f"{value * 100:.6g}" if isinstance(value, float) else value


class TimeField(forms.DateTimeField):
    """A moment, sent and kept as UTC; `static/js/moments.js` lets people read and type it in their own zone.

    A label ends in "(UTC)", which is true without that script. May be empty.
    """

    moment = True

    def __init__(self, **kwargs: Any) -> None:
        attrs = {"type": "datetime-local", "step": "1", "autocomplete": "off", "data-moment": ""}
        super().__init__(required=False, widget=forms.DateTimeInput(attrs=attrs, format="%Y-%m-%dT%H:%M:%S"), **kwargs)

    def prepare_value(self, value: Any) -> Any:
        """An address may name a zone, of which such an input knows nothing."""
        try:
            named = parse_datetime(value) if isinstance(value, str) else None
            zoned = named is not None and named.tzinfo is not None
            return super().prepare_value(named if zoned else value)
        except (ValueError, OverflowError):
            return value

    def clean(self, value: Any) -> datetime | None:
        moment: datetime | None = super().clean(value)
        if moment is not None and not EARLIEST <= moment < LATEST:
            raise forms.ValidationError("Between the years 1970 and 2199.")
        return moment


class TenantChoice(forms.ModelChoiceField):
    """Which tenant owns it; empty means all of them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(queryset=Tenant.objects.all(), required=False, empty_label="all tenants", **kwargs)


class SLOClassForm(forms.Form):
    """A class as it is promised. `name` and `tenant` are fixed once it exists: records carry them."""

    name = forms.CharField(
        max_length=64, validators=[NAME], help_text="What clients send as slo_class. It cannot be changed later."
    )
    tenant = TenantChoice(label="For", help_text="A tenant's own class wins over the common one of the same name.")
    title = forms.CharField(max_length=120, required=False, help_text="For people; optional.")
    ttft_s = SecondsField(label="First token within", help_text="TTFT, from arrival at the gateway.")
    tpot_s = SecondsField(label="Then a token every", help_text="TPOT, mean over the answer.")
    deadline_s = SecondsField(label="Whole answer within", required=False, help_text="Empty: no deadline.")
    waiting_time_s = SecondsField(
        label="Give up waiting after", help_text="A request not sent to an engine by then ends with its error."
    )
    target = PercentField(label="Attained by", help_text="Share of requests that must attain all of this.")
    value = forms.FloatField(
        min_value=0.000_001, max_value=1_000_000, help_text="Worth of one attained request, relative to other classes."
    )
    may_defer = forms.BooleanField(
        label="May be deferred",
        required=False,
        help_text="Served late rather than refused when it cannot be met.",
    )
    version = forms.IntegerField(min_value=1, required=False, widget=forms.HiddenInput)

    FIXED = ("name", "tenant")
    CHANGEABLE = ("title", "ttft_s", "tpot_s", "deadline_s", "waiting_time_s", "target", "value", "may_defer")

    def __init__(self, *args: Any, existing: SLOClass | None = None, **kwargs: Any) -> None:
        if existing is not None:
            kwargs["initial"] = {name: getattr(existing, name) for name in (*self.CHANGEABLE, "version")}
        super().__init__(*args, **kwargs)
        if existing is not None:
            for name in self.FIXED:
                del self.fields[name]
            self.fields["version"].required = True

    def clean(self) -> dict[str, Any]:
        data = super().clean() or self.cleaned_data
        deadline, ttft = data.get("deadline_s"), data.get("ttft_s")
        if deadline is not None and ttft is not None and deadline < ttft:
            self.add_error("deadline_s", "The whole answer cannot be due before its first token.")
        if data.keys() >= set(self.FIXED):
            self._check_name_is_free(data["name"], data["tenant"])
        return data

    def _check_name_is_free(self, name: str, tenant: Tenant | None) -> None:
        """The service says so too, but only once all else is right."""
        if name_is_taken(name, tenant):
            self.add_error("name", name_taken(tenant))

    def changes(self) -> dict[str, Any]:
        return {name: self.cleaned_data[name] for name in self.CHANGEABLE}


class LevelForm(forms.Form):
    """One priority level: where its targets start, and the range they may move in."""

    ttft_s = SecondsField(label="TTFT at first")
    ttft_min_s = SecondsField(label="TTFT at least")
    ttft_max_s = SecondsField(label="TTFT at most")
    tpot_s = SecondsField(label="TPOT at first")
    tpot_min_s = SecondsField(label="TPOT at least")
    tpot_max_s = SecondsField(label="TPOT at most")

    def clean(self) -> dict[str, Any]:
        data = super().clean() or self.cleaned_data
        for kind in ("ttft", "tpot"):
            start, low, high = (data.get(f"{kind}{part}_s") for part in ("", "_min", "_max"))
            if low is not None and high is not None and low > high:
                self.add_error(f"{kind}_max_s", "The largest value is below the smallest.")
            elif start is not None and low is not None and high is not None and not low <= start <= high:
                self.add_error(f"{kind}_s", "The first value lies outside its range.")
        return data

    def level(self) -> dict[str, float]:
        return asdict(LevelBounds(**self.cleaned_data))


class BaseLevels(forms.BaseFormSet):
    """A level may not promise less than the one below it: priority 0 is the most urgent. The service's own rule."""

    @cached_property
    def forms(self) -> list[LevelForm]:
        """Stored levels are marked as typed ones are: they may be older than the rule."""
        levels: list[LevelForm] = super().forms
        if not self.is_bound:
            for place, name in tighter_than_above([level.initial for level in levels]):
                levels[place].errors[name] = levels[place].error_class([TIGHTER])
        return levels

    def clean(self) -> None:
        if any(self.errors):
            return
        # All of them first: an error takes the value away that the next level is compared with.
        for place, name in tighter_than_above([level.cleaned_data for level in self.forms]):
            self.forms[place].add_error(name, TIGHTER)


LevelFormSet = forms.formset_factory(
    LevelForm, formset=BaseLevels, extra=0, min_num=1, validate_min=True, max_num=LEVELS_MAX, validate_max=True
)


class MappingForm(forms.Form):
    """The windows that the mapping looks back on, and whose least values hold when."""

    window = forms.IntegerField(min_value=1, max_value=100_000, label="Requests looked back on")
    window_age_s = SecondsField(label="None of them older than")
    contention = forms.ChoiceField(
        label="Least values",
        choices=[(rule, VALUES["contention"][rule]) for rule in CONTENTION_RULES],
        help_text="Which ones bound a level from below. While something more urgent waits, always its own.",
    )
    version = forms.IntegerField(min_value=1, widget=forms.HiddenInput)

    def __init__(self, *args: Any, existing: PriorityMapping, **kwargs: Any) -> None:
        names = ("window", "window_age_s", "contention", "version")
        kwargs["initial"] = {name: getattr(existing, name) for name in names}
        super().__init__(*args, **kwargs)


class RequestSearch(forms.Form):
    """Filters of the request list; what is empty does not filter."""

    id = forms.CharField(max_length=64, required=False, label="Id")
    tenant = forms.CharField(max_length=64, required=False)
    slo_class = forms.CharField(max_length=64, required=False, label="Class")
    model = forms.CharField(max_length=120, required=False)
    instance = forms.CharField(max_length=64, required=False)
    outcome = forms.ChoiceField(
        required=False,
        choices=[("", "any"), *((name, name) for name in ("ok", "refused", "expired", "failed", "cut", "cancelled"))],
    )
    attained = forms.ChoiceField(
        required=False, label="SLO", choices=[("", "any"), ("yes", "attained"), ("no", "missed")]
    )
    since = TimeField(label="Arrived after (UTC)")
    until = TimeField(label="Arrived before (UTC)")


class AuditSearch(forms.Form):
    """Filters of the audit; what is empty does not filter."""

    q = forms.CharField(max_length=120, required=False, label="Contains")
    kind = forms.CharField(max_length=64, required=False)
    actor = forms.CharField(max_length=150, required=False)
    actor_type = forms.ChoiceField(
        required=False, label="Actor is a", choices=[("", "any"), *Decision.ActorType.choices]
    )
    subject_type = forms.CharField(max_length=32, required=False, label="Kind of subject")
    subject = forms.CharField(max_length=255, required=False)
    tenant = forms.CharField(max_length=64, required=False, label="What bears on tenant")
    slo_class = forms.CharField(max_length=64, required=False, label="What bears on class")
    since = TimeField(label="After (UTC)")
    until = TimeField(label="Before (UTC)")
