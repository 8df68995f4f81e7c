"""A real gateway over PostgreSQL while engines start, are replaced, or do not come."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from django.utils import timezone

from controller.models import Instance, RequestRecord, ServedModel
from controller.scale.lifecycle import Replace
from controller.selectors.snapshot import config_version
from controller.services.actors import SYSTEM
from controller.services.fleet.instances import instance_create, instance_observe, instance_stop
from controller.services.fleet.lifecycle import instance_replace
from controller.services.fleet.served_models import served_model_create
from controller.services.slo.api_keys import api_key_create
from controller.services.slo.slo_classes import slo_class_create
from controller.services.slo.tenants import tenant_create
from tests.api.openai.test_process import GatewayProcess
from tests.waiting import until
from tests.workers.engine.process import EngineProcess

pytestmark = [pytest.mark.db, pytest.mark.django_db(transaction=True)]
Observed = Instance.Observed


@pytest.fixture
def gateway(tmp_path: Path, transactional_db: None) -> Iterator[GatewayProcess]:
    """Without any instance."""
    chat = slo_class_create(actor=SYSTEM, name="chat", ttft_s=5.0, tpot_s=1.0, waiting_time_s=20.0)
    tenant = tenant_create(actor=SYSTEM, name="acme", default_class=chat)
    served_model_create(actor=SYSTEM, name="demo")
    new = api_key_create(actor=SYSTEM, tenant=tenant, name="test")
    process = GatewayProcess(tmp_path, new.key, new.secret)
    yield process
    process.stop()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


def new_instance(name: str, **spec: Any) -> None:
    """As the scaler would; the provisioner's part is the test's."""
    model = ServedModel.objects.get(name="demo")
    instance_create(actor=SYSTEM, id=name, model=model, spec={"profile": "constant:10ms", **spec})


def see(name: str, state: str, url: str | None = None) -> None:
    instance_observe(instance_id=name, observed_state=state, url=url, at=timezone.now())


def queued(gateway: GatewayProcess) -> int:
    return int(requests.get(gateway.url + "/healthz", timeout=5).json()["queued"])


def told(gateway: GatewayProcess) -> None:
    """It has read the newest configuration."""
    newest = config_version()
    until(lambda: requests.get(gateway.url + "/healthz", timeout=5).json()["config_version"] >= newest)


def held(gateway: GatewayProcess, pool: ThreadPoolExecutor, count: int = 3) -> list[Future[requests.Response]]:
    asked = [pool.submit(gateway.ask, stream=bool(number % 2)) for number in range(count)]
    until(lambda: queued(gateway) == count)
    return asked


def test_without_an_instance_on_its_way_a_request_is_refused_at_once(gateway: GatewayProcess) -> None:
    began = time.monotonic()
    answer = gateway.ask()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_capacity")
    assert int(answer.headers["retry-after"]) >= 1
    assert time.monotonic() - began < 2


def test_the_first_seconds_requests_wait_for_the_engine_that_starts(
    gateway: GatewayProcess, pool: ThreadPoolExecutor
) -> None:
    new_instance("e0")
    told(gateway)
    asked = held(gateway, pool)
    see("e0", Observed.STARTING)
    with EngineProcess("--model", "demo", "--profile", "constant:10ms") as engine:
        see("e0", Observed.READY, engine.url)
        answers = [future.result(20) for future in asked]
        assert [answer.status_code for answer in answers] == [200, 200, 200], [answer.text for answer in answers]
        assert all(float(answer.headers["x-slackline-queue-ms"]) > 0 for answer in answers)
        records = until(lambda: list(RequestRecord.objects.all()) if RequestRecord.objects.count() == 3 else None)
        assert {(record.outcome, record.instance) for record in records} == {("ok", "e0")}


def test_while_the_only_engine_is_replaced_requests_wait_and_none_fails(
    gateway: GatewayProcess, pool: ThreadPoolExecutor
) -> None:
    options = ("--model", "demo", "--profile", "constant:10ms")
    with EngineProcess(*options) as first, EngineProcess(*options) as second:
        new_instance("e0")
        see("e0", Observed.READY, first.url)
        until(lambda: gateway.ask().status_code == 200)
        first.process.kill()
        first.process.wait(5)
        asked = held(gateway, pool, 4)
        decision = instance_replace(step=Replace("e0", "exited", "exit code -9"))
        assert decision is not None
        replacement = decision.outcome["replacement"]
        asked += [pool.submit(gateway.ask) for _ in range(4)]
        see(replacement, Observed.READY, second.url)
        answers = [future.result(20) for future in asked]
        assert [answer.status_code for answer in answers] == [200] * 8, [answer.text for answer in answers]
        assert {answer.headers["x-slackline-instance"] for answer in answers} == {replacement}


def test_who_waits_for_an_instance_that_is_given_up_is_answered(
    gateway: GatewayProcess, pool: ThreadPoolExecutor
) -> None:
    new_instance("e0")
    told(gateway)
    (asked,) = held(gateway, pool, 1)
    instance_stop(actor=SYSTEM, instance_id="e0")
    answer = asked.result(5)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_capacity")


def test_a_replacement_that_starts_too_late_is_not_waited_for(gateway: GatewayProcess) -> None:
    new_instance("e0", start_after=time.time() + 40)
    told(gateway)
    answer = gateway.ask(waiting_time=3)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_capacity")
    assert 30 <= int(answer.headers["retry-after"]) <= 40


def test_a_response_from_a_real_engine(gateway: GatewayProcess) -> None:
    with EngineProcess("--model", "demo", "--profile", "constant:2ms") as engine:
        new_instance("e0")
        see("e0", Observed.READY, engine.url)
        told(gateway)
        body = {"model": "demo", "input": "Say something.", "max_output_tokens": 6, "target_ttft": 2}
        headers = {"authorization": f"Bearer {gateway.secret}"}
        whole = requests.post(gateway.url + "/v1/responses", json=body, headers=headers, timeout=20)
        said = whole.json()
        assert (whole.status_code, said["object"], said["usage"]["output_tokens"]) == (200, "response", 6)
        assert (said["status"], said["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        stream = requests.post(
            gateway.url + "/v1/responses", json={**body, "stream": True}, headers=headers, timeout=20
        )
        events = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: ")]
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert len(deltas) == 6
        assert events[-1]["type"] == "response.incomplete"
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "".join(deltas)
        record = until(lambda: RequestRecord.objects.filter(streamed=True).first())
        assert (record.output_tokens, record.target_ttft_s, record.judged_by) == (6, 2.0, "tokens")
