"""Starting an instance from a launch template through the form: what is stored, refused, and shown of templates."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from console.templatetags.units import when
from controller.models import Decision, Device, Instance, LaunchTemplate, ProvisionerLook
from controller.services.fleet.launch_templates import shipped_templates_store
from tests import factories


@pytest.fixture
def model(db, live_store, announced):
    shipped_templates_store()
    return factories.served_model(name="llama")


def entered(served, template="vllm", **other):
    """What a browser sends for a form that was left as it is, but for what is needed."""
    fields = {"template": LaunchTemplate.objects.get(name=template).pk, "model": served.pk, "id": "", "folder": ""}
    rest = {"role": "collocated", "max_num_seqs": "32", "host": "", "device_kind": "", "tp": "1", "unit_cost": "1.0"}
    return fields | rest | other


def start(client, served, **other):
    return client.post(reverse("instance-start"), entered(served, **other))


def test_it_is_desired_with_the_fields_of_its_template_and_audited(operator, model, announced):
    answer = start(operator, model, id="gpu-1", folder="/models/llama", max_num_seqs="16", unit_cost="2.5")
    assert (answer.status_code, answer["location"]) == (302, reverse("instance", args=["gpu-1"]))
    row = Instance.objects.get()
    kept = (row.pk, row.provisioner, row.template.name, row.backend, row.max_num_seqs, row.unit_cost, row.spec)
    assert kept == ("gpu-1", "process", "vllm", "vllm", 16, 2.5, {"folder": "/models/llama"})
    assert row.desired_state == Instance.Desired.RUNNING
    assert announced == [1]
    decision = Decision.objects.get(kind="instance_created")
    assert (decision.actor_type, decision.subject) == ("person", "gpu-1")
    assert "gpu-1 is being started." in operator.get(answer["location"]).content.decode()


def test_without_a_name_one_is_generated(operator, model):
    start(operator, model, template="reference")
    assert Instance.objects.get().pk.startswith("reference-")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"id": "taken"}, "An instance with this name exists and is in use."),
        ({"template": ""}, "This field is required."),
        ({"role": "decode"}, "vllm starts collocated instances only."),
        ({"max_num_seqs": "0"}, "Ensure this value is greater than or equal to 1."),
        ({"id": "../x"}, "Use letters, digits and . _ - and start with a letter or digit."),
    ],
)
def test_what_is_wrong_is_told_at_its_field_and_nothing_is_created(operator, model, other, message):
    factories.instance(id="taken", model=model)
    answer = operator.post(reverse("instance-start"), entered(model) | other)
    assert answer.status_code == 422
    assert message in answer.content.decode().replace("&#x27;", "'")
    assert Instance.objects.count() == 1


def test_a_paused_template_says_why_and_starts_nothing(operator, model):
    LaunchTemplate.objects.filter(name="vllm").update(paused_at=timezone.now(), paused_reason="exit code 1: no GPU")
    page = operator.get(reverse("instance-start")).content.decode()
    assert "vllm (paused)" in page
    assert "exit code 1: no GPU" in page
    answer = start(operator, model)
    assert answer.status_code == 422
    assert "vllm is paused, because starts from it failed" in answer.content.decode()
    assert not Instance.objects.exists()


def test_the_page_shows_each_templates_command(operator, model):
    page = operator.get(reverse("instance-start")).content.decode()
    assert "vllm serve /models/example --served-model-name example" in page


def test_a_host_without_free_devices_is_told_at_its_field(operator, model):
    host = factories.host(name="box")
    Device.objects.create(host=host, index=0, kind="h100", memory_bytes=80 << 30)
    answer = start(operator, model, host=str(host.pk), tp="2")
    assert "box has 1 of 1 devices free; 2 required." in answer.content.decode()
    assert not Instance.objects.exists()


def test_the_page_of_the_instance_tells_its_template_and_the_steps_of_its_start(operator, model):
    start(operator, model, id="gpu-1")
    page = reverse("instance", args=["gpu-1"])
    assert "Engine startup" not in operator.get(page).content.decode()
    steps = {"process": 1_000.0, "weights": 1_004.5, "listening": 1_010.0, "ready": 1_010.5}
    Instance.objects.filter(pk="gpu-1").update(start_steps=steps)
    told = operator.get(page).content.decode()
    limit_s = LaunchTemplate.objects.get(name="vllm").start_limit_s
    assert f"The launch template vllm allows {limit_s:g} s until it is ready" in told
    names = ("Process started", "Weights loaded", "API listening", "Health check passed")
    assert [told.index(name) for name in names] == sorted(told.index(name) for name in names)
    assert ">4.5 s<" in told
    assert "Graphs captured" not in told
    assert "generated by Slackline" in told
    assert "*made" not in told


@pytest.mark.parametrize("name", ["process", "ray/west"])
def test_what_cannot_be_reached_is_told_where_one_starts_and_on_pages_of_its_instances(operator, model, name):
    start(operator, model, id="gpu-1")
    factories.instance(model, id="other", provisioner="static")
    if name != "process":
        Instance.objects.filter(pk="gpu-1").update(provisioner="ray", spec={"cluster": "west"})
    pages = [reverse("instance-start"), reverse("instance", args=["gpu-1"])]
    assert not any("has been unreachable since" in operator.get(page).content.decode() for page in pages)
    ProvisionerLook.objects.create(name=name, failing_since=timezone.now(), error="no answer within 2 s")
    ProvisionerLook.objects.create(name="ray/east", seen_at=timezone.now())
    for page in pages:
        told = operator.get(page).content.decode()
        assert f'<span class="mono">{name}</span> has been unreachable since' in told
        assert "no answer within 2 s" in told
    assert "has not been seen yet" in told
    Instance.objects.filter(pk="gpu-1").update(observed_at=timezone.now())
    assert "This instance is shown as last seen" in operator.get(pages[1]).content.decode()
    assert "unreachable since" not in operator.get(reverse("instance", args=["other"])).content.decode()
    Instance.objects.filter(pk="gpu-1").update(observed_state="failed", desired_state="stopped")
    assert "unreachable since" not in operator.get(pages[1]).content.decode(), "its state can no longer change"


def test_a_viewer_starts_nothing(viewer, model):
    assert viewer.get(reverse("instance-start")).status_code == 403
    assert start(viewer, model).status_code == 403
    assert "Start instance" not in viewer.get(reverse("fleet")).content.decode()


def test_without_a_model_or_a_template_the_page_says_so(operator, live_store):
    page = operator.get(reverse("instance-start")).content.decode()
    assert "There is no model yet." in page
    LaunchTemplate.objects.all().delete()
    assert "There is no launch template." in operator.get(reverse("instance-start")).content.decode()


def test_an_instance_is_started_on_a_cluster(operator, model):
    page = operator.get(reverse("instance-start")).content.decode()
    assert "Cluster ray/west" not in page
    ProvisionerLook.objects.create(name="ray/west", seen_at=timezone.now())
    assert "Cluster ray/west" in operator.get(reverse("instance-start")).content.decode()
    start(operator, model, id="ray-1", where="ray/west")
    row = Instance.objects.get(pk="ray-1")
    assert (row.provisioner, row.spec["cluster"], row.source) == ("ray", "west", "ray/west")
    refused = start(operator, model, id="ray-2", where="ray/west", host=str(factories.host(name="box").pk))
    assert "A cluster chooses the node itself" in refused.content.decode()
    assert start(operator, model, id="ray-3", where="ray/none").status_code == 422
    assert not Instance.objects.filter(pk__in=("ray-2", "ray-3")).exists()


def test_one_that_starts_again_is_not_said_to_be_ready_since_its_last_run(operator, model, live_store):
    row = factories.instance(model, id="gpu-1", ready_at=timezone.now() - timedelta(hours=7))
    pages = [reverse("fleet"), reverse("instance", args=[row.pk])]
    since = when(row.ready_at)
    for state, told in (("ready", True), ("starting", False)):
        Instance.objects.update(observed_state=state)
        assert [since in operator.get(page).content.decode() for page in pages] == [told, told], state
