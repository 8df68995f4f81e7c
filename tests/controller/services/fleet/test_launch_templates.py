"""Launch templates in the database: saved, shipped, used by instances, paused after failed starts."""

import time

import pytest
from django.core.exceptions import ValidationError
from django.utils import timezone

from controller.core.types import KEY_MADE
from controller.engine.launch_template import LaunchTemplate as Pure
from controller.engine.shipped_templates import SHIPPED
from controller.models import Decision, Instance, LaunchTemplate
from controller.services.actors import SYSTEM
from controller.services.fleet import launch_templates as services
from controller.services.fleet.instances import instance_create, instance_remove, instance_stop
from controller.services.fleet.launches import instance_put
from controller.services.fleet.lifecycle import instance_spec, instance_start
from controller.services.fleet.scaling_stages import like
from controller.services.replace import ExpectedVersion
from tests import factories

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]


@pytest.fixture
def shipped(db):
    assert services.shipped_templates_store() == len(SHIPPED)
    return {row.name: row for row in LaunchTemplate.objects.all()}


def vllm(row, model=None, **fields):
    return instance_create(actor=SYSTEM, model=model or factories.served_model(), template=row, **fields)


def test_the_shipped_ones_are_stored_once_and_stay_removed(shipped):
    assert services.shipped_templates_store() == 0
    services.launch_template_remove(actor=SYSTEM, template_id=shipped["sglang"].pk)
    assert services.shipped_templates_store() == 0
    assert services.example(shipped["vllm"])[:3] == ["vllm", "serve", "/models/example"]


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"command": ["x"]}, "command"),
        ({"environment": {"HF_TOKEN": "a"}}, "environment.HF_TOKEN"),
        ({"backend": "tgi"}, "backend"),
        ({"roles": []}, "roles"),
        ({"roles": ["judge"]}, "roles"),
        ({"spec": {"seed": 1}}, "spec"),
        ({"spec": {"kv_role": "kv_all"}}, "spec"),
        ({"spec": {"resources": {"GPU": 0}}}, "spec.resources"),
        ({"spec": {"runtime_env": ["vllm"]}}, "spec.runtime_env"),
        ({"spec": {"runtime_env": {"env_vars": {"HF_TOKEN": "hf_a"}}}}, "spec.runtime_env.env_vars.HF_TOKEN"),
        ({"backend": "sglang", "spec": {"kv_role": "kv_both"}}, "spec"),
        ({"health_path": "x"}, "health_path"),
        ({"start_limit_s": 0.0}, "start_limit_s"),
        ({"start_limit_s": 1e9}, "start_limit_s"),
        ({"name": "two words"}, "name"),
    ],
)
def test_what_is_refused_names_the_field(values, field):
    good = {"name": "a", "backend": "vllm", "command": ["vllm", "${port}"]}
    with pytest.raises(ValidationError) as error:
        services.launch_template_create(actor=SYSTEM, **{**good, **values})
    assert set(error.value.message_dict) == {field}
    assert not LaunchTemplate.objects.exists()


def test_an_instance_is_started_by_its_template(shipped):
    model = factories.served_model(name="mid", context_tokens=2048)
    row = vllm(shipped["vllm-decode"], model, id="v1", role="decode", max_num_seqs=9, spec={"folder": "/models/mid"})
    assert (row.backend, row.key, row.kv_role) == ("vllm", KEY_MADE, "kv_both")
    told = instance_start(instance_id="v1")
    launch = told["launch"]
    assert launch["command"][:6] == ["vllm", "serve", "/models/mid", "--served-model-name", "mid", "--host"]
    assert launch["command"][launch["command"].index("--max-model-len") + 1] == "2048"
    assert launch["command"][launch["command"].index("--max-num-seqs") + 1] == "9"
    assert "${port}" in launch["command"]
    assert (launch["key_variable"], launch["health_path"], launch["backend"]) == ("VLLM_API_KEY", "/health", "vllm")
    assert Pure(**{**{k: v for k, v in launch.items() if k != "backend"}, "command": tuple(launch["command"])})


def test_secrets_are_names_in_what_is_stored_and_told(shipped):
    row = shipped["vllm"]
    environment = {"HF_TOKEN": {"secret": "hf"}, "HF_HOME": "/models/${id}"}
    services.launch_template_update(
        actor=SYSTEM, template_id=row.pk, version=None, changes={"environment": environment}
    )
    one = vllm(LaunchTemplate.objects.get(pk=row.pk), id="v1")
    launch = instance_spec(one)["launch"]
    assert (launch["environment"], launch["secrets"]) == ({"HF_HOME": "/models/v1"}, {"HF_TOKEN": "hf"})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"role": "prefill"}, "role"),
        ({"spec": {"seed": 1}}, "spec"),
        ({"spec": {"folder": "relative"}}, "spec.folder"),
        ({"spec": {"runtime_env": {"pip": ["x"]}}}, "spec"),
        ({"provisioner": "static"}, "url"),
    ],
)
def test_what_does_not_fit_a_template_is_refused(shipped, fields, field):
    with pytest.raises(ValidationError) as error:
        vllm(shipped["vllm"], **fields)
    assert set(error.value.message_dict) == {field}


def test_a_runtime_environment_is_the_templates_alone(shipped):
    """It runs programs, so whoever may only start an instance has none to give; and no other provisioner sets it up."""
    row, set_up = shipped["vllm"], {"pip": ["vllm==0.32.0"]}
    changes = {"spec": {"labels": {"zone": "a"}, "runtime_env": set_up}}
    services.launch_template_update(actor=SYSTEM, template_id=row.pk, version=None, changes=changes)
    row.refresh_from_db()
    with pytest.raises(ValidationError, match="only a Ray cluster sets up"):
        vllm(row, id="here")
    made = vllm(row, id="there", provisioner="ray")
    assert made.spec == {"labels": {"zone": "a"}}
    assert instance_spec(made)["runtime_env"] == set_up
    with pytest.raises(ValidationError, match="unknown: runtime_env"):
        vllm(row, id="other", provisioner="ray", spec={"runtime_env": {"env_vars": {"PATH": "/theirs"}}})
    assert "runtime_env" not in instance_spec(vllm(shipped["vllm-decode"], id="plain", role="decode"))


def test_slackline_starts_no_vllm_without_a_template():
    with pytest.raises(ValidationError, match="from a launch template only"):
        instance_create(actor=SYSTEM, model=factories.served_model(), backend="vllm")


def test_another_one_like_it_has_its_template_and_no_weights_of_its_own_to_load(shipped):
    row = vllm(shipped["vllm"], spec={"folder": "/m"})
    copied = like(row, warm=True)
    assert (copied["template"], copied["spec"]) == (shipped["vllm"], {"folder": "/m"})
    other = instance_create(actor=SYSTEM, model=row.model, **copied)
    assert (other.weights, other.key) == ("present", KEY_MADE)


def test_a_put_of_an_instance_keeps_template_and_key(shipped):
    values = {
        "model": factories.served_model(), "backend": "vllm", "provisioner": "process", "template": shipped["vllm"],
    }  # fmt: skip
    anything = ExpectedVersion()
    _, made = instance_put(actor=SYSTEM, instance_id="v1", values=values, expected=anything)
    assert made
    before = Instance.objects.values().get(pk="v1")
    _, made = instance_put(actor=SYSTEM, instance_id="v1", values=values, expected=anything)
    assert (made, Instance.objects.values().get(pk="v1")) == (False, before)


def test_a_put_that_is_repeated_changes_nothing_with_a_runtime_environment(shipped):
    """It is the template's alone, and no field of the instance's spec."""
    row, spec = shipped["vllm"], {"labels": {"zone": "a"}, "runtime_env": {"pip": ["vllm==0.32.0"]}}
    services.launch_template_update(actor=SYSTEM, template_id=row.pk, version=None, changes={"spec": spec})
    row.refresh_from_db()
    values = {"model": factories.served_model(), "backend": "vllm", "provisioner": "ray", "template": row}
    for given in ({}, {"spec": {"cluster": "west"}}):
        for made in (not given, False):
            _, new = instance_put(actor=SYSTEM, instance_id="v1", values=values | given, expected=ExpectedVersion())
            stored = Instance.objects.get(pk="v1").spec
            assert (new, stored) == (made, {"labels": {"zone": "a"}, **given.get("spec", {})})


def test_one_of_a_cluster_that_does_not_exist_can_be_removed(shipped):
    """Nothing looks at such a cluster, so its instance is never seen to have ended."""
    row = vllm(shipped["vllm"], id="v1", provisioner="ray", spec={"cluster": "mistyped"})
    with pytest.raises(ValidationError, match="Stop it before you remove it"):
        instance_remove(actor=SYSTEM, instance_id="v1")
    instance_stop(actor=SYSTEM, instance_id="v1")
    Instance.objects.update(observed_at=timezone.now())
    with pytest.raises(ValidationError, match="still pending"):
        instance_remove(actor=SYSTEM, instance_id="v1")
    Instance.objects.update(observed_at=None)
    instance_remove(actor=SYSTEM, instance_id="v1")
    assert not Instance.objects.filter(pk=row.pk).exists()


def test_a_paused_template_starts_nothing_until_it_is_changed_or_resumed(shipped):
    row = shipped["vllm"]
    for mend in ("resume", "change"):
        told = services.launch_template_pause(actor=SYSTEM, row=row, instance="v1", failures=3, error="exit code 1")
        assert (told.kind, told.inputs["never_ready"]) == ("launch_template_paused", 3)
        assert services.launch_template_pause(actor=SYSTEM, row=row, instance="v2", failures=3, error="x") is None
        with pytest.raises(ValidationError, match="is paused"):
            vllm(LaunchTemplate.objects.get(pk=row.pk))
        vllm(shipped["reference"])  # the others go on
        if mend == "resume":
            services.launch_template_resume(actor=SYSTEM, template_id=row.pk)
        else:
            changes = {"start_limit_s": 60.0 + time.time() % 1}
            services.launch_template_update(actor=SYSTEM, template_id=row.pk, version=None, changes=changes)
        vllm(LaunchTemplate.objects.get(pk=row.pk))
    assert Decision.objects.filter(kind="launch_template_resumed").count() == 2


def test_a_template_in_use_is_not_removed(shipped):
    vllm(shipped["vllm"], id="v1")
    with pytest.raises(ValidationError, match="still in use by v1"):
        services.launch_template_remove(actor=SYSTEM, template_id=shipped["vllm"].pk)
