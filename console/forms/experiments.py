"""The form of a new experiment: how its fields become a spec, and how errors of the spec become errors of a field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from django import forms
from django.conf import settings
from django.utils import timezone

from console.forms.base import PositiveSecondsField, TimeField
from controller.dispatch import POLICY_SETS
from controller.models import ServedModel
from controller.selectors.experiments import results as experiments
from controller.selectors.experiments.fleet_model import default_model
from controller.selectors.experiments.policy_today import overrides_today
from controller.services.experiments.reading import REQUESTS_MAX
from controller.services.experiments.specs import RATES_MAX
from workers.experiments.shipped_profiles import profile_names

CONTENDERS = 4
CHANGE_MAX = 16
USUAL_PROFILE = "llama-3.1-8b-a100"
SEEDS_MAX = 5
KINDS = (("window", "Recorded traffic"), ("trace", "Uploaded trace"), ("mix", "Generated traffic"))
MIXES = (
    ("4-task", "HyperFlexis 4-task (Table 1)"),
    ("2-task", "HyperFlexis 2-task (Table 1)"),
    ("own", "Custom task"),
)
LAWS = tuple((law, law) for law in ("normal", "lognormal", "gamma", "constant"))
PARTS = {
    "window": ("since", "until", "model", "tenant", "slo_class"),
    "trace": ("trace", "trace_ttft_s", "trace_tpot_s"),
    "mix": ("mix", "rate", "duration_s", "cv"),
}
NEEDED = ("since", "until", *PARTS["trace"], *PARTS["mix"], "profile", "count")
OWN = ("prompt_mean", "prompt_std", "output_mean", "output_std", "law", "own_ttft_s", "own_tpot_s")


def tokens(label: str, least: int = 1, **kwargs: Any) -> forms.IntegerField:
    field = forms.IntegerField(label=label, min_value=least, max_value=100_000, required=False, **kwargs)
    field.unit = "tokens"  # type: ignore[attr-defined]
    return field


class ExperimentForm(forms.Form):
    """Traffic, fleet and repeats. Fields of the kinds of traffic that are not selected are ignored."""

    name = forms.CharField(max_length=120, required=False, help_text="Leave empty to name it after its traffic.")
    kind = forms.ChoiceField(label="Source", choices=KINDS, initial="window")

    since = TimeField(label="From (UTC)")
    until = TimeField(label="To (UTC)")
    model = forms.ChoiceField(required=False, help_text="Replays the requests for this model.")
    tenant = forms.CharField(max_length=64, required=False, help_text="Leave empty for all tenants.")
    slo_class = forms.CharField(max_length=64, required=False, label="Class", help_text="Leave empty for all classes.")

    trace = forms.ChoiceField(required=False)
    trace_ttft_s = PositiveSecondsField(label="TTFT", required=False, initial=2.0)
    trace_tpot_s = PositiveSecondsField(label="TPOT", required=False, initial=0.1)

    mix = forms.ChoiceField(label="Workload", choices=MIXES, required=False)
    rate = forms.FloatField(min_value=0.001, max_value=100_000, required=False, initial=10.0, label="Rate")
    duration_s = PositiveSecondsField(label="Duration", required=False, initial=120.0)
    cv = forms.FloatField(
        min_value=0, max_value=20, required=False, initial=1.0, label="Burstiness",
        help_text="Coefficient of variation of the time between requests: 1 is Poisson, 0 is constant.",
    )  # fmt: skip
    prompt_mean = tokens("Mean prompt", initial=500)
    prompt_std = tokens("Prompt standard deviation", 0, initial=200)
    output_mean = tokens("Mean output", initial=100)
    output_std = tokens("Output standard deviation", 0, initial=50)
    law = forms.ChoiceField(label="Distribution", choices=LAWS, required=False)
    own_ttft_s = PositiveSecondsField(label="TTFT", required=False, initial=1.0)
    own_tpot_s = PositiveSecondsField(label="TPOT", required=False, initial=0.1)

    fleet = forms.ChoiceField(
        label="Based on",
        choices=[
            ("today", "Current instances"),
            ("then", "Instances at the time of the traffic"),
            ("profile", "Shipped profile"),
        ],
        initial="today",
    )
    profile = forms.ChoiceField(required=False, choices=())
    count = forms.IntegerField(label="Instances", min_value=1, max_value=256, required=False, initial=2)

    rates = forms.CharField(
        max_length=200, required=False, label="Rates",
        help_text=f"Up to {RATES_MAX}, separated by commas. Leave empty for the original rate.",
    )  # fmt: skip
    seeds = forms.IntegerField(
        min_value=1, max_value=SEEDS_MAX, initial=1, label="Repeats",
        help_text="With different random seeds; results are medians. Recorded traffic needs only one.",
    )  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        fields: dict[str, Any] = self.fields
        names = list(ServedModel.objects.order_by("name").values_list("name", flat=True))
        fields["model"].choices = [("", "Busiest model")] + [(name, name) for name in names]
        known = experiments.traces().values_list("slug", "name", "requests")[:200]
        fields["trace"].choices = [(slug, f"{name} ({count:,} requests)") for slug, name, count in known]
        fields["profile"].choices = [(name, name) for name in profile_names()]
        fields["rate"].unit = fields["rates"].unit = "requests/s"
        for name in (*NEEDED, *OWN):  # required once their kind of traffic or fleet is selected, so not "(optional)"
            fields[name].needed = True
        if USUAL_PROFILE in dict(fields["profile"].choices):
            fields["profile"].initial = USUAL_PROFILE
        now = timezone.now().replace(microsecond=0)
        self.initial.setdefault("since", now - timedelta(hours=1))
        self.initial.setdefault("until", now)

    def clean_rates(self) -> list[float]:
        found = []
        for part in filter(None, (each.strip() for each in self.cleaned_data["rates"].split(","))):
            try:
                rate = float(part)
            except ValueError:
                rate = 0.0
            if not 0 < rate <= 100_000:
                raise forms.ValidationError(f"{part!r} is not a valid rate. Enter numbers above 0 and at most 100,000.")
            found.append(rate)
        if len(found) > RATES_MAX:
            raise forms.ValidationError(f"Enter at most {RATES_MAX} rates.")
        return found

    def clean(self) -> dict[str, Any]:
        """Fields that the selected kinds of traffic and fleet need are required."""
        data = super().clean() or self.cleaned_data
        kind = data.get("kind")
        needed = {"window": ("since", "until"), "trace": PARTS["trace"], "mix": PARTS["mix"]}.get(kind or "", ())
        if kind == "mix" and data.get("mix") == "own":
            needed += OWN
        if data.get("fleet") == "profile":
            needed += ("profile", "count")
        for name in needed:
            if data.get(name) in (None, "") and name not in self.errors:
                self.add_error(name, "This field is required.")
        since, until = data.get("since"), data.get("until")
        if data.get("fleet") == "then" and kind != "window":
            self.add_error("fleet", "Available for recorded traffic only.")
        if kind == "window" and since and until and since >= until:
            self.add_error("until", "Must be after the start time.")
        for name in [n for n in self.errors if n in self._unused(data)]:
            del self.errors[name]
        return data

    def _unused(self, data: Mapping[str, Any]) -> set[str]:
        """Fields of kinds of traffic or fleet that are not selected: their values are ignored."""
        unused = {name for kind, names in PARTS.items() if kind != data.get("kind") for name in names}
        if data.get("kind") != "mix" or data.get("mix") != "own":
            unused |= set(OWN)
        return unused | ({"profile", "count"} if data.get("fleet") != "profile" else set())

    # ---- as a spec ------------------------------------------------------------------------------------------------

    def workload(self) -> dict[str, Any]:
        data = self.cleaned_data
        if data["kind"] == "window":
            times = {name: data[name].isoformat() for name in ("since", "until")}
            chosen = {name: data[name] for name in ("model", "tenant", "slo_class") if data[name]}
            return {"kind": "window", **times, **chosen}
        if data["kind"] == "trace":
            targets = {"ttft_s": data["trace_ttft_s"], "tpot_s": data["trace_tpot_s"]}
            return {"kind": "trace", "path": data["trace"], **targets}
        times = {name: data[name] for name in ("rate", "duration_s", "cv")}
        if data["mix"] != "own":
            return {"kind": "mix", "mix": data["mix"], **times}
        task = {
            "name": "own",
            "ttft_s": data["own_ttft_s"],
            "tpot_s": data["own_tpot_s"],
            **{what: self._lengths(what) for what in ("prompt", "output")},
        }
        return {"kind": "tasks", "tasks": [task], **times}

    def _lengths(self, what: str) -> dict[str, Any]:
        data = self.cleaned_data
        return {"law": data["law"], "mean": data[f"{what}_mean"], "std": data[f"{what}_std"]}

    def instances(self, change: int) -> Any:
        data = self.cleaned_data
        if data["fleet"] != "profile":
            return {"fleet": data["fleet"], "model": data["model"] or default_model(), "change": change}
        return {"profile": data["profile"], "count": data["count"] + change}

    def spec(self, contenders: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """`contenders`: policy and change in instances of each variant in use."""
        labels = labels_of(contenders)
        policies = [
            {**policy_now(each["policy"]), "label": label, "instances": self.instances(each["change"])}
            for each, label in zip(contenders, labels, strict=True)
        ]
        found: dict[str, Any] = {
            "instances": policies[0]["instances"],
            "workload": self.workload(),
            "policies": policies,
            "seeds": list(range(1, self.cleaned_data["seeds"] + 1)),
        }
        if self.cleaned_data["rates"]:
            found["rates"] = self.cleaned_data["rates"]
        return found

    def _trace_name(self) -> str:
        choices: Any = self.fields["trace"].choices  # type: ignore[attr-defined]
        return str(dict(choices)[self.cleaned_data["trace"]]).rsplit(" (", 1)[0][:50]

    def default_name(self, contenders: Sequence[Mapping[str, Any]]) -> str:
        data = self.cleaned_data
        traffic = {
            "window": lambda: f"{data['since']:%d %b %H:%M} to {data['until']:%H:%M} UTC",
            "trace": self._trace_name,
            "mix": lambda: dict(MIXES)[data["mix"]],
        }[data["kind"]]()
        return f"{traffic}: {' vs. '.join(labels_of(contenders))}"[:120]


class ContenderForm(forms.Form):
    """One variant: a policy set and a number of instances. A variant without a policy is ignored."""

    policy = forms.ChoiceField(required=False, label="Policy set")
    change = forms.IntegerField(
        required=False, initial=0, label="Change in instances", min_value=-CHANGE_MAX, max_value=CHANGE_MAX,
        help_text="For example, 1 for one more or -1 for one fewer.",
    )  # fmt: skip

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = [(name, name.replace("_", " ")) for name in POLICY_SETS]
        live = settings.DISPATCH_POLICY
        shown = [(name, f"{text} (current)" if name == live else text) for name, text in names]
        self.fields["policy"].choices = [("", "None"), *shown]  # type: ignore[attr-defined]
        self.fields["policy"].needed = self.fields["change"].needed = True  # type: ignore[attr-defined]

    def clean_change(self) -> int:
        return self.cleaned_data["change"] or 0


class BaseContenders(forms.BaseFormSet):
    """Up to four variants."""

    def used(self) -> list[tuple[int, dict[str, Any]]]:
        """Variants with a policy, with their position on the page."""
        return [(i, each.cleaned_data) for i, each in enumerate(self.forms) if each.cleaned_data.get("policy")]

    def clean(self) -> None:
        if any(self.errors):
            return
        rows = self.used()
        if not self.forms:
            raise forms.ValidationError("Select at least one policy set.")
        if not rows:
            self.forms[0].add_error("policy", "Select at least one policy set.")
        seen = set()
        for place, row in rows:
            key = (row["policy"], row["change"])
            if key in seen:
                self.forms[place].add_error(
                    "policy", "Same as a variant above. Change the policy set or the number of instances."
                )
            seen.add(key)


ContenderFormSet = forms.formset_factory(
    ContenderForm, formset=BaseContenders, extra=0, min_num=CONTENDERS, max_num=CONTENDERS, absolute_max=CONTENDERS
)


def first_contenders() -> list[dict[str, Any]]:
    """Initial variants: the current policy set, unchanged and with one fewer instance."""
    live = settings.DISPATCH_POLICY
    return [{"policy": live, "change": 0}, {"policy": live, "change": -1}, {"change": 0}, {"change": 0}]


def policy_now(name: str) -> dict[str, Any]:
    """The policy set; the current one with the settings and the ordering that the gateways use."""
    overrides = overrides_today(settings.DISPATCH_OVERRIDES) if name == settings.DISPATCH_POLICY else {}
    return {"name": name, "overrides": overrides} if overrides else {"name": name}


def labels_of(contenders: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{each['policy'].replace('_', ' ')}{changed_words(each['change'])}" for each in contenders]


def changed_words(change: int) -> str:
    if not change:
        return ""
    size = abs(change)
    return f", {size} {'fewer' if change < 0 else 'more'} instance{'s' if size > 1 else ''}"


# Form fields by path in the spec. Errors of other paths are shown above the form.
FIELDS = {
    "workload.since": "since", "workload.until": "until", "workload.model": "model", "workload.path": "trace",
    "workload.rate": "rate", "workload.duration_s": "duration_s", "workload.cv": "cv", "rates": "rates",
    "seeds": "seeds", "instances": "fleet", "name": "name",
    "workload.tenant": "tenant", "workload.slo_class": "slo_class",
}  # fmt: skip
OWN_FIELDS = {"prompt": "prompt_std", "output": "output_std"}


def place_error(form: ExperimentForm, contenders: Any, used: Sequence[int], field: str, text: str) -> None:
    """Add an error of the spec to its form field. `used`: positions on the page of the spec's policies."""
    policy = re.match(r"policies\[(\d+)\]\.?(.*)", field)
    if policy and int(policy[1]) < len(used):
        sized = policy[2].endswith(("change", "count"))
        if not policy[2].startswith("instances") or sized:
            name = "change" if sized else "policy"
            contenders.forms[used[int(policy[1])]].add_error(name, text)
        else:
            form.add_error("fleet", text)
        return
    for start, name in FIELDS.items():
        if field.startswith(start):
            form.add_error(name, text)
            return
    task = re.match(r"workload\.tasks\[0\]\.(prompt|output)", field)
    form.add_error(OWN_FIELDS[task[1]] if task else None, text)


def estimate_words(requests: int | None, runs: int) -> str:
    if requests is None:
        return f"{runs} runs."
    each = f"about {requests:,} requests" if runs == 1 else f"{runs} runs of about {requests:,} requests"
    return f"{each[0].upper()}{each[1:]} (limit: {REQUESTS_MAX:,} per run)."
