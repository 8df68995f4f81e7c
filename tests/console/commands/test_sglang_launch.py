"""The command for a server seeded from a running one: printed from what the seed says, or refused by name."""

from __future__ import annotations

import shlex

import pytest
from django.core.management import CommandError, call_command

from controller.models import Instance
from tests import factories
from tests.workers.backends.sglang_server import SglangServer, serving
from tests.workers.backends.test_sglang_launch import parsed
from workers.backends.sglang_launch import SEEDS

pytestmark = [pytest.mark.db, pytest.mark.django_db]


def seed(server: SglangServer) -> Instance:
    return factories.instance(id="gpu-1", backend="sglang", provisioner="static", url=server.url)


def test_the_command_is_what_a_joiner_understands(capsys: pytest.CaptureFixture[str]) -> None:
    server = SglangServer(**{SEEDS: True})
    with serving(server):
        seed(server)
        call_command("sglang_launch", "--seed", "gpu-1", "--port", "30001")
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
            call_command("sglang_launch", *arguments, "--port", "30001")


def test_a_seed_that_sleeps_has_nothing_to_give() -> None:
    server = SglangServer(**{SEEDS: True})
    with serving(server):
        seed(server)
        server.paused = True
        with pytest.raises(CommandError, match="paused"):
            call_command("sglang_launch", "--seed", "gpu-1", "--port", "30001")
