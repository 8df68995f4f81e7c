"""A reference engine exchanges its scheduler with its role: from the order to what the running engine batches by."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import requests
from django.utils import timezone

from controller.models import Action, Instance
from controller.selectors.snapshot import gateway_snapshot
from controller.services.actors import Actor
from controller.services.fleet.role_switches import role_order
from tests import factories
from tests.workers.engine.client import post_once
from tests.workers.engine.process import FLEET, EngineProcess
from workers.actions.long_calls import LongCalls
from workers.actions.runner import advance_actions

pytestmark = [pytest.mark.db, pytest.mark.django_db, pytest.mark.usefixtures("patient")]
OLGA = Actor.person("olga")
SLOW = ("--profile", "constant:20ms")


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    monkeypatch.setenv("FLEET_TOKEN", FLEET["token"])
    settings.FLEET_TOKEN = FLEET["token"]


def row_of(engine: EngineProcess, role: str, **spec: Any) -> Instance:
    fields = {"id": "e1", "backend": "reference", "role": role, "started_role": role, "url": engine.url, "spec": spec}
    return factories.instance(**fields, observed_state="ready")


def info(engine: EngineProcess) -> dict[str, Any]:
    return requests.get(engine.url + "/server_info", timeout=10).json()


def batching(engine: EngineProcess) -> str:
    return str(info(engine)["batching"])


def say(engine: EngineProcess, role: str) -> requests.Response:
    return post_once(engine.url, "/role", {**FLEET, "role": role})


def answer(engine: EngineProcess, tokens: int = 2) -> requests.Response:
    body = {"model": info(engine)["model"], "prompt": "hello there", "max_tokens": tokens, "ignore_eos": True}
    return requests.post(engine.url + "/v1/completions", json=body, timeout=30)


def prompt_tokens(engine: EngineProcess) -> float:
    page = requests.get(engine.url + "/metrics", timeout=10).text
    (line,) = [line for line in page.splitlines() if line.startswith("vllm:prompt_tokens_total")]
    return float(line.split()[-1])


def looks() -> list[str]:
    """Reasons of the decisions of a look, gateways having heard of the order."""
    Action.objects.update(created_at=timezone.now() - timedelta(seconds=3))
    return [decision.reason for decision in advance_actions([], calls=LongCalls(threads=False))]


def test_an_idle_decode_engine_is_turned_and_prefills_by_the_set_of_prefill() -> None:
    with EngineProcess("--role", "decode", *SLOW) as engine:
        row = row_of(engine, "decode")
        assert batching(engine) == "kairos_decode"
        assert answer(engine).status_code == 200
        counted = prompt_tokens(engine)
        assert role_order(actor=OLGA, instance_id="e1", role="prefill") is not None
        assert gateway_snapshot().draining == ("e1",)  # nothing new is sent there meanwhile
        assert looks() == ["switched"]
        row.refresh_from_db()
        assert (row.role, row.role_at_start) == ("prefill", "prefill")
        assert (info(engine)["role"], batching(engine)) == ("prefill", "slo_aware_batching")
        assert info(engine)["preemption"]["boundary"] == "operator"
        assert answer(engine).status_code == 200
        assert prompt_tokens(engine) > counted
        role_order(actor=OLGA, instance_id="e1", role="decode")
        assert looks() == ["switched"]
        assert batching(engine) == "kairos_decode"
        assert answer(engine).status_code == 200


def test_a_busy_one_keeps_its_scheduler_until_it_is_idle() -> None:
    with EngineProcess("--role", "decode", *SLOW) as engine:
        row_of(engine, "decode")
        role_order(actor=OLGA, instance_id="e1", role="prefill")
        running = threading.Thread(target=answer, args=(engine, 150))
        running.start()
        while "num_requests_running{" not in (page := requests.get(engine.url + "/metrics", timeout=10).text) or (
            " 1.0" not in next(line for line in page.splitlines() if line.startswith("vllm:num_requests_running"))
        ):
            pass
        assert looks() == []
        assert (Instance.objects.get().role, batching(engine)) == ("decode", "kairos_decode")
        running.join(30)
        assert looks() == ["switched"]
        assert batching(engine) == "slo_aware_batching"


@pytest.mark.parametrize("options", [("--batching", "vllm_v1"), ("--scheduler", "continuous")])
def test_an_option_that_says_how_to_batch_wins(options: tuple[str, ...]) -> None:
    with EngineProcess("--role", "decode", *SLOW, *options) as engine:
        said = batching(engine)
        row_of(engine, "decode", **{options[0].removeprefix("--"): options[1]})
        assert role_order(actor=OLGA, instance_id="e1", role="prefill") is None  # routing alone, at once
        assert Instance.objects.get().role == "prefill"
        assert say(engine, "prefill").json() == {"role": "prefill", "batching": said}
        assert said == ("vllm_v1" if options[0] == "--batching" else "chunked_prefill")


def test_an_instance_that_is_not_started_yet_starts_in_its_new_role() -> None:
    factories.instance(id="e1", backend="reference", role="decode", provisioner="process", observed_state="pending")
    assert role_order(actor=OLGA, instance_id="e1", role="prefill") is None
    assert Instance.objects.get().role == "prefill"


def test_only_who_knows_the_token_may_turn_it_and_only_to_a_role() -> None:
    with EngineProcess("--role", "prefill", *SLOW) as engine:
        assert requests.post(engine.url + "/role", json={"role": "decode"}, timeout=10).status_code == 403
        assert say(engine, "both").status_code == 400
        assert batching(engine) == "slo_aware_batching"
