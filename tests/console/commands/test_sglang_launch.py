"""The command for a server seeded from a running one: printed from what the seed says, or refused by name."""

from __future__ import annotations

import shlex
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from controller.models import Action, Decision, Instance
from controller.services.actors import SYSTEM
from controller.services.decisions import decision_record
from controller.services.fleet.launches import LAUNCH, launch_record
from controller.wording.sentences import sentence
from tests import factories
from tests.workers.backends.sglang_server import SglangServer, serving
from tests.workers.backends.test_sglang_launch import parsed
from workers.backends.sglang_launch import SEEDS

pytestmark = [pytest.mark.db, pytest.mark.django_db]


def seed(server: SglangServer, id: str = "gpu-1", **fields: Any) -> Instance:
    return factories.instance(id=id, **fields, backend="sglang", provisioner="static", url=server.url)


def test_the_command_is_what_a_joiner_understands(capsys: pytest.CaptureFixture[str]) -> None:
    server = SglangServer(**{SEEDS: True})
    with serving(server):
        seed(server)
        call_command("sglang_launch", "--id", "gpu-2", "--seed", "gpu-1", "--port", "30001")
    words = shlex.split(capsys.readouterr().out)
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    args = parsed(words[3:])
    assert (args.port, args.model_path, args.load_format) == (30001, "/models/demo", "remote_instance")
    assert f"http://127.0.0.1:{args.remote_instance_weight_loader_seed_instance_service_port}" == server.url


@pytest.mark.parametrize(
    ("options", "arguments", "said"),
    [
        ({}, ["--seed", "gpu-1"], SEEDS),
        ({}, ["--seed", "gpu-1", "--way", "nccl"], "ports"),
        ({}, ["--seed", "gpu-1", "--way", "nccl", "--ports", "x"], "whole numbers"),
        ({}, ["--seed", "nobody"], "seed"),
    ],
)
def test_what_could_not_work_is_refused_by_name(options: dict, arguments: list[str], said: str) -> None:
    server = SglangServer(**options)
    with serving(server):
        seed(server)
        with pytest.raises(CommandError, match=said):
            call_command("sglang_launch", *arguments, "--id", "gpu-2", "--port", "30001")
    assert not Decision.objects.filter(kind=LAUNCH).exists()


def test_a_seed_that_sleeps_has_nothing_to_give() -> None:
    server = SglangServer(**{SEEDS: True})
    with serving(server):
        seed(server)
        server.paused = True
        with pytest.raises(CommandError, match="paused"):
            call_command("sglang_launch", "--id", "gpu-2", "--seed", "gpu-1", "--port", "30001")


def test_the_command_is_a_decision_under_the_new_servers_name(capsys: pytest.CaptureFixture[str]) -> None:
    server = SglangServer(**{SEEDS: True})
    with serving(server):
        seed(server)
        call_command("sglang_launch", "--id", "gpu-2", "--seed", "gpu-1", "--port", "30001")
    (decision,) = Decision.objects.filter(kind=LAUNCH)
    assert (decision.subject_type, decision.subject, decision.reason) == ("instance", "gpu-2", "seeded")
    assert (decision.inputs["seed"], decision.inputs["way"], decision.rejected) == ("gpu-1", "transfer_engine", {})
    assert decision.outcome["command"] == capsys.readouterr().out.strip()
    assert sentence(decision) == "slackline issued a launch command for gpu-2 with the weights of gpu-1"


def test_a_model_takes_the_first_seed_that_can_and_says_why_others_cannot() -> None:
    cannot, can = SglangServer(), SglangServer(**{SEEDS: True})
    with serving(cannot), serving(can):
        model = seed(cannot).model
        seed(can, "gpu-3", model=model)
        call_command("sglang_launch", "--id", "gpu-2", "--model", model.name, "--port", "30001")
    (decision,) = Decision.objects.filter(kind=LAUNCH)
    assert decision.inputs["seed"] == "gpu-3"
    assert SEEDS in decision.rejected["gpu-1"]


def test_no_instance_serves_the_model() -> None:
    with pytest.raises(CommandError, match="no ready SGLang instance serves 'other'"):
        call_command("sglang_launch", "--id", "gpu-2", "--model", "other", "--port", "30001")


def test_a_name_that_is_taken_is_refused() -> None:
    with serving(SglangServer(**{SEEDS: True})) as _:
        factories.instance(id="gpu-2")
        with pytest.raises(CommandError, match="id: instance 'gpu-2' already exists"):
            call_command("sglang_launch", "--id", "gpu-2", "--seed", "gpu-1", "--port", "30001")


def test_registered_under_that_name_its_first_request_is_waited_for() -> None:
    model = factories.served_model(name="demo")
    told = launch_record(actor=SYSTEM, instance_id="gpu-2", seed="gpu-1", command="c", inputs={}, rejected={})
    call_command(
        "register_instances", "--model", model.name, "--backend", "sglang", "gpu-2=http://h:1", "gpu-9=http://h:2"
    )
    (watch,) = Action.objects.filter(kind=Action.Kind.FIRST_SERVED)
    assert (watch.instance_id, watch.params["launch"]["decision"]) == ("gpu-2", told.pk)


def test_an_old_command_says_nothing_of_a_new_instance() -> None:
    model = factories.served_model(name="demo")
    whom = {"kind": LAUNCH, "subject_type": "instance", "subject": "gpu-2", "reason": "seeded"}
    decision_record(actor=SYSTEM, at=timezone.now() - timedelta(hours=2), inputs={"seed": "gpu-1"}, **whom)
    call_command("register_instances", "--model", model.name, "--backend", "sglang", "gpu-2=http://h:1")
    assert not Action.objects.exists()
