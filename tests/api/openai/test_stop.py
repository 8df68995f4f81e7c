"""A gateway that stops refuses what is new and ends what is open in words that clients understand, with its record."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from django.utils import timezone

from api.openai.in_flight import COMPLETIONS
from controller.models import Instance, RequestRecord
from controller.selectors.snapshot import config_version
from controller.services.actors import SYSTEM
from controller.services.fleet.instances import instance_create, instance_observe
from controller.services.fleet.served_models import served_model_create
from tests.api.openai.gateways import KEY, TestBed, completion, snapshot
from tests.api.openai.test_process import GatewayProcess, gateway_over
from tests.waiting import until, until_on_loop
from tests.workers.engine.process import EngineProcess
from workers.backends.fake import Script

GRACE_S = 2
HASTY = ("-c", f"from api.openai import __main__ as m; m.GRACE_S = {GRACE_S}; raise SystemExit(m.main())")
LONG = 4_000  # tokens: 40 s


@pytest.mark.parametrize(
    ("script", "stream", "status", "outcome"),
    [
        (Script(hang_after=0), True, 503, "failed"),
        (Script(hang_after=0), False, 503, "failed"),
        (Script(hang_after=2), True, 200, "cut"),
    ],
    ids=["before its first token", "not streamed", "after its first token"],
)
async def test_what_is_open_at_the_end_is_ended_and_recorded(
    script: Script, stream: bool, status: int, outcome: str
) -> None:
    async with TestBed(snapshot(("e1",))) as bed:
        backend = bed.backend("e1", script)
        client = bed.send(completion(stream=stream))
        await until_on_loop(lambda: backend.running == 1 and (status == 503 or client.answer.body))
        bed.gateway.closing = True
        bed.gateway.runtime.give_up()
        answer = await client.done()
        error = json.loads(answer.events[-1])["error"] if status == 200 else answer.error
        assert (answer.status, error["code"]) == (status, "shutting_down")
        assert "[DONE]" not in answer.events
        assert (status == 503) == ("retry-after" in answer.headers)
        (record,) = bed.sink.records
        assert (record.outcome, record.error_code, record.http_status) == (outcome, "shutting_down", status)
        assert backend.aborted == [record.id]
        assert bed.gateway.runtime.requests == {}


async def test_what_waits_in_the_queue_is_refused() -> None:
    async with TestBed(snapshot(("e1",)), policy="fcfs_window") as bed:
        bed.every(Script(hang_after=0))
        clients = [bed.send(completion(stream=True)) for _ in range(60)]
        await until_on_loop(lambda: bed.backend("e1").running + len(bed.gateway.scheduler.dispatcher.queue()) == 60)
        waiting = len(bed.gateway.scheduler.dispatcher.queue())
        bed.gateway.runtime.give_up()
        answers = [await client.done() for client in clients]
        assert {(answer.status, answer.error["code"]) for answer in answers} == {(503, "shutting_down")}
        bed.gateway.refused.close()  # writes what stands for several refusals of a second
        assert sum(record.stands_for for record in bed.sink.records if record.outcome == "refused") == waiting > 0
        assert len(bed.gateway.scheduler.dispatcher.queue()) == 0


async def test_a_request_whose_body_ends_after_the_stop_began_is_refused() -> None:
    async with TestBed() as bed:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if bed.gateway.closing:
                return {"type": "http.disconnect"}
            bed.gateway.closing = True
            return {"type": "http.request", "body": json.dumps(completion()).encode(), "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"authorization", f"Bearer {KEY}".encode())]
        await bed.app({"type": "http", "path": COMPLETIONS, "method": "POST", "headers": headers}, receive, send)
        assert (sent[0]["status"], json.loads(sent[1]["body"])["error"]["code"]) == (503, "shutting_down")
        assert bed.gateway.runtime.requests == {}


@pytest.fixture
def hasty(tmp_path: Path, transactional_db: None) -> Iterator[GatewayProcess]:
    """One that gives running requests `GRACE_S`, and has a model whose only instance never starts."""
    with EngineProcess("--model", "demo", "--profile", "constant:10ms") as engine:
        process = gateway_over(tmp_path, [engine], HASTY)
        later = served_model_create(actor=SYSTEM, name="later")
        instance_create(actor=SYSTEM, id="l0", model=later, spec={"profile": "constant:10ms"})
        instance_observe(instance_id="l0", observed_state=Instance.Observed.STARTING, url=None, at=timezone.now())
        yield process
        process.stop()


def unfinished(gateway: GatewayProcess) -> socket.socket:
    """A request whose body never ends."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {gateway.secret}\r\n"
    opened = socket.create_connection(("127.0.0.1", gateway.port), 10)
    opened.sendall(head.encode() + b'Content-Length: 100\r\n\r\n{"model"')
    return opened


def code(answer: requests.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.db
@pytest.mark.django_db(transaction=True)
def test_a_stop_ends_a_queued_request_and_a_long_stream_with_their_records(hasty: GatewayProcess) -> None:
    def health() -> Any:
        return requests.get(hasty.url + "/healthz", timeout=5)

    with ThreadPoolExecutor(8) as pool, unfinished(hasty) as cut_short:
        until(lambda: health().json()["config_version"] >= config_version())
        assert health().json()["config_age_s"] < 10
        queued = pool.submit(hasty.ask, model="later")
        until(lambda: health().json()["queued"] == 1)
        stream, whole = pool.submit(hasty.ask, stream=True, max_tokens=LONG), pool.submit(hasty.ask, max_tokens=LONG)
        # 1.7 s: longer than the second for which /healthz keeps an answer, shorter than the grace
        brief = pool.submit(hasty.ask, stream=True, max_tokens=170)
        until(lambda: health().json()["open"] == 4)
        began = time.monotonic()
        hasty.process.send_signal(signal.SIGTERM)
        until(lambda: health().status_code == 503)
        assert code(hasty.ask()) == (503, "shutting_down")
        assert code(queued.result()) == code(whole.result()) == (503, "shutting_down")
        events = stream.result().text.rstrip().split("\n\n")
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert len(events) > 10
        assert brief.result().text.rstrip().endswith("[DONE]")
        said = b"".join(iter(lambda: cut_short.recv(4096), b""))
        assert (said.split()[1], b'"shutting_down"' in said) == (b"503", True)
        assert hasty.stop() in (0, -signal.SIGTERM)
        assert GRACE_S <= time.monotonic() - began < GRACE_S + 4
    ends = {(record.outcome, record.error_code) for record in RequestRecord.objects.all()}
    lost = "shutting_down"
    assert ends == {("refused", lost), ("cut", lost), ("failed", lost), ("ok", "")}
    assert RequestRecord.objects.count() == 4
