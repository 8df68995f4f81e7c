"""`manage.py serve_model`, which `make up MODEL=...` runs at each start."""

import json

import pytest
from django.core.management import CommandError, call_command

from controller.models import Instance, ServedModel
from controller.services.actors import SYSTEM
from controller.services.fleet.instances import instance_stop

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "tiny"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    return made


def test_a_model_is_served_once(folder):
    for _ in range(2):
        call_command("serve_model", str(folder))
    row = Instance.objects.get()
    assert (row.model.name, row.template.name, row.backend) == ("tiny", "vllm", "vllm")
    assert row.spec == {"folder": str(folder)}
    assert ServedModel.objects.get().context_tokens == 2048


def test_one_that_was_stopped_gets_another_at_the_next_start(folder):
    call_command("serve_model", str(folder))
    instance_stop(actor=SYSTEM, instance_id=Instance.objects.get().pk)
    call_command("serve_model", str(folder), "--template", "sglang")
    assert Instance.objects.filter(desired_state="running").get().backend == "sglang"


@pytest.mark.parametrize(
    ("named", "config", "template", "said"),
    [
        ("tiny", None, "vllm", "no readable config.json"),
        ("tiny", "not JSON", "vllm", "no readable config.json"),
        ("tiny", "[]", "vllm", "no readable config.json"),
        ("two words", "{}", "vllm", "MODEL: "),
        ("tiny", "{}", "tgi", "ENGINE: there is no launch template 'tgi'; known: reference, sglang, vllm"),
    ],
)
def test_what_is_wrong_names_the_variable(tmp_path, named, config, template, said):
    folder = tmp_path / named
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(config)
    with pytest.raises(CommandError, match=r"MODEL|ENGINE") as error:
        call_command("serve_model", str(folder), "--template", template)
    assert said in str(error.value)
    assert not Instance.objects.exists()
