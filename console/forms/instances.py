"""The forms that register a running server, start an instance and edit one. Every error belongs to a field."""

from __future__ import annotations

from typing import Any

from django import forms
from django.conf import settings

from console.forms.base import EditForm
from controller.core.addresses import url_problem
from controller.core.types import DEFAULT_MAX_NUM_SEQS
from controller.models import Host, Instance, LaunchTemplate, ServedModel
from controller.models.base import INSTANCE_ID
from controller.models.fleet import KvRole, Role
from controller.scale.provisioning import PROCESS, Hosts, abilities
from controller.selectors.fleet.topology import clusters
from controller.services.fleet.instances import KEY_NAME
from controller.wording.values import BACKEND_NAMES

SEQS_MAX, TP_MAX, COST_MAX = 100_000, 1024, 1e6
SERVES = "The model that it serves. If it is not listed, create it with the control API first."
FOR_GOOD = "Cannot be changed later."
KEY_LIKE = ("sk-", "hf_", "Bearer")  # how keys begin


def device_kind_field() -> forms.CharField:
    text = "Selects the latency profile, for example h100."
    return forms.CharField(max_length=64, required=False, label="Device kind", help_text=text)


def unit_cost_field() -> forms.FloatField:
    text = "Cost of one second of this instance."
    return forms.FloatField(min_value=0, max_value=COST_MAX, initial=1.0, label="Cost", help_text=text)


class NewInstanceForm(EditForm):
    """What registering a server and starting an instance have in common."""

    model = forms.ModelChoiceField(queryset=ServedModel.objects.none(), help_text=SERVES)
    role = forms.ChoiceField(choices=[(role.value, role.value) for role in Role], initial=Role.COLLOCATED.value)
    host = forms.ModelChoiceField(queryset=Host.objects.none(), required=False, empty_label="Unknown")
    device_kind = device_kind_field()
    tp = forms.IntegerField(min_value=1, max_value=TP_MAX, initial=1, label="Tensor parallel degree")
    unit_cost = unit_cost_field()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.fields["version"]
        self.fields["model"].queryset = ServedModel.objects.order_by("name")  # type: ignore[attr-defined]
        self.fields["host"].queryset = Host.objects.order_by("name")  # type: ignore[attr-defined]


def checked_key_name(name: str) -> str:
    """Raises ValidationError if it cannot be the name of a key's file, or looks like the key itself."""
    if name.startswith(KEY_LIKE):
        raise forms.ValidationError("This looks like a key. Enter the name of the file that the key is in.")
    if name and not KEY_NAME.fullmatch(name):
        raise forms.ValidationError("Use letters, digits and . _ - and start with a letter or digit.")
    return name


def key_name_field() -> forms.CharField:
    return forms.CharField(
        max_length=64,
        required=False,
        label="Name of its API key",
        help_text="Name of the file in ENGINE_KEYS_DIR on the machines of gateways and workers, not the key itself. "
        "Leave empty if the server asks for no key.",
        widget=forms.TextInput(attrs={"autocomplete": "off"}),
    )


class InstanceForm(NewInstanceForm):
    """A server that runs already. Its API key is named and never entered: the console does not have it."""

    field_order = ("id", "model", "url", "backend", "role", "kv_role", "key_name", "max_num_seqs", "host")

    id = forms.CharField(max_length=63, validators=[INSTANCE_ID], label="Name", help_text=FOR_GOOD)
    url = forms.CharField(
        max_length=255, label="URL", help_text="For example http://10.0.0.7:8000. Must be in ENGINE_NETWORKS."
    )
    backend = forms.ChoiceField(choices=list(BACKEND_NAMES.items()), initial="vllm")
    kv_role = forms.ChoiceField(
        choices=[("", "unknown"), *((role, role) for role in KvRole.values)],
        required=False,
        label="KV role",
        help_text="For vLLM with a KV connector: as it was started. With kv_both the scaler may change its role.",
    )
    key_name = key_name_field()
    max_num_seqs = forms.IntegerField(
        min_value=1,
        max_value=SEQS_MAX,
        required=False,
        label="Maximum running requests",
        help_text="Leave empty for what the server reports.",
    )

    def clean_id(self) -> str:
        return unused(self.cleaned_data["id"])

    def clean_url(self) -> str:
        url = str(self.cleaned_data["url"]).rstrip("/")
        if problem := url_problem(url, settings.ENGINE_NETWORKS):
            raise forms.ValidationError(problem)
        there = Instance.objects.live().filter(url=url).exclude(observed_state__in=Instance.GONE).first()
        if there is not None:
            raise forms.ValidationError(f"{there} is registered with this URL.")
        return url

    def clean_key_name(self) -> str:
        return checked_key_name(self.cleaned_data["key_name"])

    def clean(self) -> dict[str, Any]:
        data = super().clean() or self.cleaned_data
        if data.get("kv_role") and data.get("backend", "vllm") != "vllm":
            self.add_error("kv_role", "Only a vLLM server has a KV role.")
        return data

    def values(self) -> dict[str, Any]:
        """What `instance_join` takes."""
        values = super().values()
        kv_role = values.pop("kv_role")
        return values | {"spec": {"kv_role": kv_role} if kv_role else {}}


class StartForm(NewInstanceForm):
    """An instance that Slackline starts with the command of a launch template."""

    field_order = ("template", "where", "model", "id", "folder", "role", "max_num_seqs", "host")

    where = forms.ChoiceField(
        required=False, label="Where", help_text="The machine of Slackline, or a cluster that places it on a node."
    )
    template = forms.ModelChoiceField(
        queryset=LaunchTemplate.objects.none(), help_text="How its engine is started. The commands are below."
    )
    id = forms.CharField(
        max_length=63,
        validators=[INSTANCE_ID],
        required=False,
        label="Name",
        help_text=f"Leave empty for a generated one. {FOR_GOOD}",
    )
    folder = forms.CharField(
        max_length=255,
        required=False,
        label="Model folder",
        help_text="What the engine loads, as ${model} of the command. Leave empty for the name of the model.",
    )
    max_num_seqs = forms.IntegerField(
        min_value=1,
        max_value=SEQS_MAX,
        initial=DEFAULT_MAX_NUM_SEQS,
        label="Maximum running requests",
        help_text="As ${slots} of the command.",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        holds = "An instance with a host holds as many of its devices as its tensor parallel degree."
        self.fields["host"].help_text = holds
        self.fields["where"].choices = places_to_start()  # type: ignore[attr-defined]
        templates = LaunchTemplate.objects.order_by("name")
        self.fields["template"].queryset = templates  # type: ignore[attr-defined]
        self.fields["template"].label_from_instance = _with_state  # type: ignore[attr-defined]

    def clean_id(self) -> str | None:
        return unused(self.cleaned_data["id"]) if self.cleaned_data["id"] else None

    def values(self) -> dict[str, Any]:
        """What `instance_create` takes."""
        values = super().values()
        folder, where = values.pop("folder"), values.pop("where") or PROCESS
        provisioner, _, cluster = where.partition("/")
        spec = {name: value for name, value in (("folder", folder), ("cluster", cluster)) if value}
        return values | {"provisioner": provisioner, "spec": spec}

    def clean(self) -> dict[str, Any]:
        data = super().clean() or self.cleaned_data
        if data.get("host") is not None and abilities(data.get("where") or PROCESS).hosts == Hosts.CLUSTER:
            self.add_error("host", "A cluster chooses the node itself: leave this empty.")
        return data


def places_to_start() -> list[tuple[str, str]]:
    """This machine, and the clusters that workers look at."""
    return [(PROCESS, "This machine"), *((look.name, f"Cluster {look.name}") for look in clusters())]


class InstanceEditForm(EditForm):
    """What can change about an instance that exists. Only a registered server has the name of a key, and may report
    itself how many requests it runs at once."""

    key_name = key_name_field()
    configured_seqs = forms.IntegerField(
        min_value=1,
        max_value=SEQS_MAX,
        label="Maximum running requests",
        help_text="The most requests that are sent to it at once.",
    )
    host = forms.ModelChoiceField(queryset=Host.objects.none(), required=False, empty_label="Unknown")
    device_kind = device_kind_field()
    unit_cost = unit_cost_field()

    CHANGEABLE: tuple[str, ...] = ("key_name", "configured_seqs", "host", "device_kind", "unit_cost")

    def __init__(self, *args: Any, existing: Instance, **kwargs: Any) -> None:
        super().__init__(*args, existing=existing, **kwargs)
        self.fields["host"].queryset = Host.objects.order_by("name")  # type: ignore[attr-defined]
        if existing.abilities.registers:
            seqs = self.fields["configured_seqs"]
            seqs.required, seqs.help_text = False, "Leave empty for what the server reports."
        else:
            del self.fields["key_name"]
            self.CHANGEABLE = tuple(name for name in self.CHANGEABLE if name != "key_name")

    def clean_key_name(self) -> str:
        return checked_key_name(self.cleaned_data["key_name"])

    def values(self) -> dict[str, Any]:
        """What `instance_update` takes."""
        values = super().values()
        return values | {"max_num_seqs": values.pop("configured_seqs")}


def _with_state(template: LaunchTemplate) -> str:
    return f"{template.name} (paused)" if template.paused_at is not None else template.name


def unused(wanted: str) -> str:
    """The name of a new instance. Raises ValidationError if one has it."""
    there = Instance.objects.filter(pk=wanted).first()
    if there is not None:
        state = "stopped" if there.desired_state == Instance.Desired.STOPPED else "in use"
        raise forms.ValidationError(f"An instance with this name exists and is {state}. Choose another name.")
    return wanted
