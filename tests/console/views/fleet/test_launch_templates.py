"""Launch templates on pages: what is stored, refused, shown before it is saved, resumed and removed."""

from __future__ import annotations

import pytest
from django.urls import reverse
from django.utils import timezone

from controller.models import Decision, LaunchTemplate
from controller.services.actors import SYSTEM
from controller.services.fleet.launch_templates import (
    launch_template_create,
    launch_template_update,
    shipped_templates_store,
)
from tests import factories

GOOD = {
    "name": "vllm-small",
    "backend": "vllm",
    "roles": ["collocated", "decode"],
    "command": "vllm\nserve\n${model}\n--port\n${port}\n--chat-template\nYou are {a}, $$5",
    "environment": "HF_HUB_OFFLINE=1\nHF_TOKEN=${secret:hf-token}",
    "spec": 'kv_role=kv_consumer\nlabels={"zone": "a"}',
    "health_path": "/health",
    "key_variable": "VLLM_API_KEY",
    "start_limit_s": "900",
}
COMMAND = ["vllm", "serve", "${model}", "--port", "${port}", "--chat-template", "You are {a}, $$5"]
pytestmark = pytest.mark.django_db


def change(client, row, **other):
    fields = {name: value for name, value in GOOD.items() if name != "name"}
    address = reverse("launch-template-edit", args=[row.pk])
    return client.post(address, {**fields, "version": str(row.version), **other})


@pytest.fixture
def template(admin):
    admin.post(reverse("launch-template-new"), GOOD)
    return LaunchTemplate.objects.get(name="vllm-small")


def test_a_template_is_created_as_it_was_entered(admin):
    answer = admin.post(reverse("launch-template-new"), GOOD)
    assert (answer.status_code, answer["location"]) == (302, reverse("launch-templates"))
    row = LaunchTemplate.objects.get(name="vllm-small")
    assert (row.command, row.roles) == (COMMAND, ["collocated", "decode"])
    assert row.spec == {"kv_role": "kv_consumer", "labels": {"zone": "a"}}
    assert row.environment == {"HF_HUB_OFFLINE": "1", "HF_TOKEN": {"secret": "hf-token"}}
    assert (row.key_variable, row.start_limit_s) == ("VLLM_API_KEY", 900.0)
    assert Decision.objects.get(kind="launch_template_created").actor_type == "person"
    page = admin.get(answer["location"]).content.decode()
    assert "Launch template vllm-small created." in page
    assert "vllm serve /models/example --port 8100 --chat-template" in page
    assert "You are {a}, $5" in page
    assert "HF_TOKEN=${secret:hf-token}" in page


def test_the_form_of_a_stored_template_stores_the_same(admin):
    shipped_templates_store()
    for row in LaunchTemplate.objects.all():
        form = admin.get(reverse("launch-template-edit", args=[row.pk])).context["form"]
        data = {name: form[name].value() for name in form.fields}
        assert admin.post(reverse("launch-template-edit", args=[row.pk]), data).status_code == 302
        row.refresh_from_db()
        assert row.version == 1, "nothing was changed"


def test_texts_with_line_breaks_and_quotes_stay_what_they_are(admin):
    odd = ["vllm", "--port", "${port}", "two\nlines", '"quoted"', "", " a ", "one\r", '{"a": 1}', "\u2028", ""]
    environment = {"A": "x\ny", "B": "", "C": '"', "D": " b=c "}
    row = launch_template_create(actor=SYSTEM, name="odd", backend="vllm", command=odd, environment=environment)
    form = admin.get(reverse("launch-template-edit", args=[row.pk])).context["form"]
    data = {name: form[name].value() for name in form.fields}
    assert admin.post(reverse("launch-template-edit", args=[row.pk]), data).status_code == 302
    row.refresh_from_db()
    assert (row.command, row.environment, row.version) == (odd, environment, 1)


def test_what_a_template_says_of_a_cluster_is_kept_by_its_form(admin):
    """It is written by the control API too, and was once erased by whoever changed anything else here."""
    spec = {
        "cluster": "east", "resources": {"GPU": 1, "CPU": 0.5}, "labels": {"zone": "ä"},
        "runtime_env": {"pip": ["vllm==0.32.0"], "env_vars": {"A": "${B}"}},
    }  # fmt: skip
    command = ["vllm", "serve", "--port", "${port}"]
    row = launch_template_create(actor=SYSTEM, name="on-ray", backend="vllm", command=command, spec=spec)
    form = admin.get(reverse("launch-template-edit", args=[row.pk])).context["form"]
    data = {name: form[name].value() for name in form.fields}
    assert admin.post(reverse("launch-template-edit", args=[row.pk]), {**data, "start_limit_s": 60}).status_code == 302
    row.refresh_from_db()
    assert (row.spec, row.start_limit_s) == (spec, 60.0)


def test_the_command_is_shown_before_anything_is_saved(admin):
    answer = admin.post(reverse("launch-template-new"), {**GOOD, "check": "1"})
    page = answer.content.decode()
    assert answer.status_code == 200
    assert "Nothing is saved yet" in page
    assert "vllm serve /models/example --port 8100" in page
    assert not LaunchTemplate.objects.filter(name="vllm-small").exists()


def test_a_change_that_is_only_looked_at_is_not_saved(admin, template):
    answer = change(admin, template, command="sglang\n--port\n${port}", check="1")
    assert (answer.status_code, "sglang --port 8100" in answer.content.decode()) == (200, True)
    template.refresh_from_db()
    assert (template.version, template.command) == (1, COMMAND)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("command", "", "This field is required."),
        ("command", "vllm\nserve", "Must contain ${port}"),
        ("command", "vllm\n--port\n${port}\n--api-key=abc", "Line 4: A secret on a command line is visible"),
        ("command", "vllm\n${nonsense}\n${port}", "Line 2: "),
        ("environment", "HF_HUB_OFFLINE", "Line 1: enter NAME=value."),
        ("environment", "A=1\nA=2", "Line 2: A is entered twice."),
        ("environment", "HF_TOKEN=hf_abcdef", "HF_TOKEN: "),
        ("environment", "HF_TOKEN=${secret:../etc}", "HF_TOKEN: "),
        ("environment", "LD_PRELOAD=/tmp/x.so", "LD_PRELOAD: "),
        ("command", 'vllm\n${port}\n"no end', "Line 3: a text in double quotes must be written as in JSON"),
        ("environment", 'A="no end', "Line 1: a text in double quotes must be written as in JSON"),
        ("roles", [], "This field is required."),
        ("spec", "kv_role=kv_all", "must be one of: "),
        ("spec", "seed=1", "May only have: kv_role, cluster, resources, labels, runtime_env."),
        ("spec", "labels", "Line 1: enter NAME=value."),
        ("spec", "cluster=east\nlabels={zone: a}", "Line 2: must be written as in JSON"),
        ("spec", 'resources={"GPU": NaN}', "Line 1: must be written as in JSON"),
        ("spec", "labels=" + '{"a":' * 20_000, "Line 1: must be written as in JSON"),
        ("spec", 'labels={"a": "\\ud800"}', "Line 1: must be written as in JSON"),
        ("spec", 'labels={"a": "\\u0000"}', "Line 1: must have no NUL."),
        ("spec", 'resources={"GPU": 0}', "resources: Must be an object of at most 32 amounts above 0"),
        ("spec", 'runtime_env={"image_uri": "x"}', "runtime_env.image_uri: Unknown; valid: "),
        (
            "spec",
            'runtime_env={"env_vars": {"HF_TOKEN": "hf_a"}}',
            "runtime_env.env_vars.HF_TOKEN: Looks like a secret",
        ),
        ("command", 'vllm\n${port}\n"\\ud800"', "Line 3: "),
        ("environment", 'A="\\ud800"', "A: "),
        ("health_path", "health", "Must be a path such as /health."),
        ("start_limit_s", "-1", "greater than or equal"),
    ],
)
def test_what_is_wrong_is_told_at_its_field(admin, field, value, told):
    answer = admin.post(reverse("launch-template-new"), {**GOOD, field: value})
    assert answer.status_code == 422
    assert told in " ".join(answer.context["form"].errors[field])
    assert not LaunchTemplate.objects.filter(name="vllm-small").exists()


def test_a_name_that_is_taken_is_told(admin, template):
    answer = admin.post(reverse("launch-template-new"), GOOD)
    assert (answer.status_code, list(answer.context["form"].errors)) == (422, ["name"])


def test_a_change_resumes_a_paused_template_and_can_be_reverted(admin, template):
    LaunchTemplate.objects.update(paused_at=timezone.now(), paused_reason="It did not listen.")
    assert "It did not listen." in admin.get(reverse("launch-templates")).content.decode()
    answer = change(admin, template, start_limit_s="60")
    template.refresh_from_db()
    assert (answer.status_code, template.start_limit_s, template.paused_at) == (302, 60.0, None)
    page = admin.get(answer["location"]).content.decode()
    decision = Decision.objects.get(kind="launch_template_updated")
    assert f"?restore={decision.pk}" in page
    form = admin.get(f"{reverse('launch-template-edit', args=[template.pk])}?restore={decision.pk}").context["form"]
    assert form["start_limit_s"].value() == 900.0


def test_who_saves_second_sees_both_values(admin, template):
    launch_template_update(
        actor=SYSTEM, template_id=template.pk, version=1, changes={"start_limit_s": 30.0, "roles": ["decode"]}
    )
    answer = change(admin, template, start_limit_s="60")
    assert answer.status_code == 412
    labels = {each.label for each in answer.context["conflict"]}
    assert {"Start limit", "Roles"} <= labels
    template.refresh_from_db()
    assert template.start_limit_s == 30.0


def test_an_operator_resumes_and_does_not_edit(operator, admin, template):
    LaunchTemplate.objects.update(paused_at=timezone.now(), paused_reason="It did not listen.")
    page = operator.get(reverse("launch-templates")).content.decode()
    assert f"Resume {template.name}" in page
    assert f"Edit {template.name}" not in page
    answer = operator.post(reverse("launch-template-resume", args=[template.pk]), {"version": "1"})
    template.refresh_from_db()
    assert (answer.status_code, template.paused_at) == (302, None)
    again = operator.post(reverse("launch-template-resume", args=[template.pk]), {"version": "1"}, follow=True)
    assert "Not resumed: " in again.content.decode()


def test_a_template_is_removed_after_a_confirmation(admin, template):
    address = reverse("launch-template-remove", args=[template.pk])
    assert "Instances can no longer be started from" in admin.get(address).content.decode()
    assert admin.post(address, {"version": "7"}).status_code == 412
    assert admin.post(address, {}).status_code == 422
    assert admin.post(address, {"version": "1"})["location"] == reverse("launch-templates")
    assert not LaunchTemplate.objects.filter(pk=template.pk).exists()
    gone = admin.get(reverse("launch-template-edit", args=[template.pk]))
    assert (gone.status_code, "was removed" in gone.content.decode()) == (410, True)
    history = admin.get(reverse("launch-template-history", args=[template.pk])).content.decode()
    assert "Create again" in history


def test_one_that_instances_were_started_from_is_kept(admin, template, live_store):
    factories.instance(id="gpu-1", template=template)
    answer = admin.post(reverse("launch-template-remove", args=[template.pk]), {"version": "1"})
    assert answer.status_code == 409
    assert LaunchTemplate.objects.filter(pk=template.pk).exists()


def test_without_a_template_the_list_says_what_to_do(admin, operator):
    assert "Create a template to start vLLM or SGLang." in admin.get(reverse("launch-templates")).content.decode()
    assert "An admin can create one." in operator.get(reverse("launch-templates")).content.decode()
