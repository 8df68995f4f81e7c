"""The real thing: a gateway process over PostgreSQL, Redis and reference engine processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from django.conf import settings
from django.db import connection
from django.utils import timezone

from api.openai.learned_state import LearnedFile
from controller.models import ApiKey, Instance, RequestRecord, WorkflowResult
from controller.selectors.records.goodput import goodput, result_of
from controller.services.actors import SYSTEM
from controller.services.fleet.instances import instance_observe, instance_register
from controller.services.fleet.served_models import served_model_create
from controller.services.slo.api_keys import api_key_create, api_key_revoke
from controller.services.slo.slo_classes import slo_class_create
from controller.services.slo.tenants import tenant_create
from tests.forked import Forked, forks
from tests.waiting import until
from tests.workers.engine.process import EngineProcess
from workers import live
from workers.supervisor.embedded import EmbeddedPostgres, EmbeddedRedis
from workers.supervisor.ports import free_port

pytestmark = [pytest.mark.db, pytest.mark.django_db(transaction=True)]
READY_S = 60.0  # a start on a busy machine
PROGRAM = ("-m", "api.openai")


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


class GatewayProcess:
    """`program`: what Python runs, if not the gateway as it is."""

    def __init__(
        self,
        folder: Path,
        key: ApiKey,
        secret: str,
        program: Sequence[str] = PROGRAM,
        ready: int = 200,
        name: str = "",
        **changed: str,
    ) -> None:
        """`ready`: what its /healthz answers once it listens. `name`: of an earlier one. `changed`: settings."""
        self.folder, self.key, self.secret, self.ready = folder, key, secret, ready
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.name = name or f"gw-{self.port}"
        database = connection.settings_dict
        environment = os.environ | {
            "DATABASE_URL": f"postgresql://postgres@127.0.0.1:{database['PORT']}/{database['NAME']}",
            "REDIS_URL": settings.REDIS_URL,
            "DATA_DIR": str(folder),
            "SECRET_KEY": "x" * 40,
            "DJANGO_SETTINGS_MODULE": "console.settings",
            "TELEMETRY_PERIOD_S": "0.2",
            **changed,
        }
        options = ("--port", str(self.port), "--name", self.name)
        self.process: subprocess.Popen[bytes] | Forked
        with (folder / "gateway.log").open("ab") as log:
            if program == PROGRAM:
                self.process = forks().start(program[1], options, environment, log)
            else:
                command = [sys.executable, *program, *options]
                self.process = subprocess.Popen(command, env=environment, stderr=log, stdout=log)
        try:
            until(self._ready, READY_S)
        except AssertionError:
            self.process.kill()
            raise

    def _ready(self) -> bool:
        assert self.process.poll() is None, (self.folder / "gateway.log").read_text()
        try:
            return requests.get(self.url + "/healthz", timeout=2).status_code == self.ready
        except requests.ConnectionError:
            return False

    def ask(self, whole: bool = True, **changes: Any) -> requests.Response:
        """`whole`: returns when the answer has been read."""
        body = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True, **changes}
        url = self.url + "/v1/completions"
        return requests.post(url, json=body, headers=bearer(self.secret), timeout=30, stream=not whole)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(15)
        finally:
            self.process.kill()


@pytest.fixture
def two_engines() -> Iterator[list[EngineProcess]]:
    options = ("--model", "demo", "--profile", "constant:10ms")
    with EngineProcess(*options) as first, EngineProcess(*options) as second:
        yield [first, second]


def gateway_over(
    folder: Path, engines: Sequence[EngineProcess], *program: Sequence[str], **changed: str
) -> GatewayProcess:
    """Over engines that serve `demo`. `changed`: settings."""
    chat = slo_class_create(actor=SYSTEM, name="chat", ttft_s=5.0, tpot_s=1.0, waiting_time_s=20.0)
    tenant = tenant_create(actor=SYSTEM, name="acme", default_class=chat)
    model = served_model_create(actor=SYSTEM, name="demo")
    for index, engine in enumerate(engines):
        instance_register(actor=SYSTEM, id=f"e{index}", model=model, url=engine.url, backend="reference")
        instance_observe(instance_id=f"e{index}", observed_state=Instance.Observed.READY, at=timezone.now())
    new = api_key_create(actor=SYSTEM, tenant=tenant, name="test")
    return GatewayProcess(folder, new.key, new.secret, *program, **changed)


@pytest.fixture
def gateway(tmp_path: Path, two_engines: list[EngineProcess], transactional_db: None) -> Iterator[GatewayProcess]:
    process = gateway_over(tmp_path, two_engines)
    yield process
    process.stop()


def test_a_request_is_served_recorded_and_published(gateway: GatewayProcess) -> None:
    answer = gateway.ask(stream=True)
    assert answer.status_code == 200
    assert answer.text.rstrip().endswith("data: [DONE]")
    request_id = answer.headers["x-slackline-request-id"]
    record = until(lambda: RequestRecord.objects.filter(pk=request_id).first())
    assert (record.tenant, record.slo_class, record.outcome, record.output_tokens) == ("acme", "chat", "ok", 4)
    assert record.attained
    assert record.instance == answer.headers["x-slackline-instance"]
    (fleet,) = until(lambda: [f for f in live.read_fleet() if f["classes"]])
    assert fleet["gateway"] == gateway.name
    assert {i["id"]: i["state"] for i in fleet["instances"]} == {"e0": "up", "e1": "up"}
    live.ask_queue()
    (queue,) = until(live.read_queue)
    assert queue["rows"] == []
    page = requests.get(gateway.url + "/metrics", timeout=5).text
    assert 'slackline_attainment_ratio{slo_class="chat",tenant="acme"} 1.0' in page


def test_a_revoked_key_stops_within_a_second(gateway: GatewayProcess) -> None:
    assert gateway.ask().status_code == 200
    api_key_revoke(actor=SYSTEM, key_id=gateway.key.pk)
    revoked_at = time.monotonic()
    until(lambda: gateway.ask().status_code == 401, 3)
    assert time.monotonic() - revoked_at < 1.5
    assert gateway.ask().json()["error"]["code"] == "invalid_api_key"


def test_an_answer_that_streams_ends_when_its_key_is_revoked(gateway: GatewayProcess) -> None:
    other = api_key_create(actor=SYSTEM, tenant=gateway.key.tenant, name="other")
    until(lambda: requests.get(gateway.url + "/v1/models", headers=bearer(other.secret), timeout=5).ok)
    with ThreadPoolExecutor(1) as pool, gateway.ask(stream=True, max_tokens=1_000, whole=False) as answer:
        lines = filter(None, answer.iter_lines(decode_unicode=True))
        assert next(lines).startswith("data: ")
        body = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True, "stream": True}
        url = gateway.url + "/v1/completions"
        kept = pool.submit(requests.post, url, json=body, headers=bearer(other.secret), timeout=30)
        api_key_revoke(actor=SYSTEM, key_id=gateway.key.pk)
        revoked_at = time.monotonic()
        last = list(lines)[-1]
        assert time.monotonic() - revoked_at < 2
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "invalid_api_key"
        assert kept.result().text.rstrip().endswith("data: [DONE]")
    record = until(lambda: RequestRecord.objects.filter(error_code="invalid_api_key").first())
    assert (record.outcome, record.attained) == ("cut", False)


def test_a_body_that_ends_after_its_key_was_revoked_is_refused(gateway: GatewayProcess) -> None:
    """On a raw socket, as whoever stole a key would do it: the head and ten bytes come before, the rest after."""
    body = json.dumps({"model": "demo", "prompt": [1, 2, 3], "max_tokens": 200, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {gateway.secret}\r\nConnection: close\r\n"
    )
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as connected:
        connected.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:10])
        until(lambda: gateway.ask().status_code == 200)
        api_key_revoke(actor=SYSTEM, key_id=gateway.key.pk)
        until(lambda: gateway.ask().status_code == 401, 3)
        connected.sendall(body[10:])
        answer = b"".join(iter(lambda: connected.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"invalid_api_key" in answer


def test_bounds_of_the_queue_are_those_of_the_settings(tmp_path: Path, two_engines: list[EngineProcess]) -> None:
    first = gateway_over(tmp_path, two_engines)
    first.stop()
    changed = {"QUEUE_BODY_MIB": "4", "TENANT_QUEUE_SHARE": "0.01"}
    small = GatewayProcess(tmp_path, first.key, first.secret, **changed)
    try:
        assert small.ask().status_code == 200
        refused = small.ask(user="x" * 50_000)  # a hundredth of 4 MiB is 41,943 bytes
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    finally:
        small.stop()


@pytest.mark.parametrize(("age_s", "status"), [(50.0, 200), (70.0, 503)])
def test_a_gateway_that_starts_without_a_database_judges_the_age_of_its_file(
    tmp_path: Path, two_engines: list[EngineProcess], age_s: float, status: int
) -> None:
    first = gateway_over(tmp_path, two_engines)
    first.stop()
    (kept,) = tmp_path.glob("*.snapshot.json")
    named = ("-c", f"import sys; sys.argv[-1] = {first.name!r}; from api.openai import __main__ as m; m.main()")
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"confirmed_at": time.time() - age_s}))
    away = {"DATABASE_URL": f"postgresql://postgres@127.0.0.1:{free_port()}/none", "CONFIG_MAX_AGE_S": "60"}
    second = GatewayProcess(tmp_path, first.key, first.secret, named, ready=status, **away)
    try:
        answer = second.ask()
        assert answer.status_code == status
        if status == 503:
            assert answer.json()["error"]["code"] == "configuration_stale"
    finally:
        second.stop()


def test_an_engine_killed_under_load_loses_no_request(
    gateway: GatewayProcess, two_engines: list[EngineProcess]
) -> None:
    begun: set[int] = set()  # answers of engine 0 that have a first token and no end
    ended_by: Counter[str] = Counter()

    def one(index: int) -> tuple[str, str]:
        with gateway.ask(stream=True, max_tokens=40, whole=False) as answer:
            assert answer.status_code == 200
            instance, last = answer.headers["x-slackline-instance"], ""
            for line in filter(None, answer.iter_lines(decode_unicode=True)):
                last = line
                if instance == "e0":
                    begun.add(index)
        begun.discard(index)
        ended_by[instance] += 1
        return answer.headers["x-slackline-request-id"], last

    def stopped_within_an_answer() -> bool:
        """What engine 0 wrote before it was stopped has been read when another answer of engine 1 has ended."""
        before = ended_by["e1"]
        two_engines[0].process.send_signal(signal.SIGSTOP)
        until(lambda: ended_by["e1"] > before)
        if not begun:
            two_engines[0].process.send_signal(signal.SIGCONT)
        return bool(begun)

    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(one, index) for index in range(64)]
        until(lambda: sum(answer.done() for answer in answers) >= 8)
        until(stopped_within_an_answer)
        two_engines[0].process.kill()
        ended = dict(answer.result() for answer in answers)
    cut = {name for name, last in ended.items() if last != "data: [DONE]"}
    assert 0 < len(cut) <= 16
    assert all("engine_failed" in ended[name] for name in cut)
    until(lambda: RequestRecord.objects.count() == 64)
    outcomes = {record.id: record.outcome for record in RequestRecord.objects.all()}
    assert outcomes == {name: "cut" if name in cut else "ok" for name in ended}
    down = until(lambda: [i for f in live.read_fleet() for i in f["instances"] if i["state"] == "down"])
    assert [instance["id"] for instance in down] == ["e0"]


def asked_queue() -> list[Any]:
    """Whole queues with something in them; asks for newer ones."""
    live.ask_queue()
    return [queue for queue in live.read_queue() if queue["rows"]]


def test_queued_requests_are_cancelled_from_outside(gateway: GatewayProcess, two_engines: list[EngineProcess]) -> None:
    for engine in two_engines:
        engine.process.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(100) as pool:
            answers = [pool.submit(gateway.ask, prompt=[5] * 100, max_tokens=8) for _ in range(100)]
            (queue,) = until(asked_queue)
            victim = queue["rows"][-1]["id"]
            (done,) = live.send_command("operator", "cancel", [victim, "req-unknown"], valid_s=20.0, wait_s=20.0)
            assert (done["gateway"], done["applied"], done["gone"]) == (gateway.name, [victim], ["req-unknown"])
            for engine in two_engines:
                engine.process.send_signal(signal.SIGCONT)
            ended = [answer.result() for answer in answers]
    finally:
        for engine in two_engines:
            engine.process.send_signal(signal.SIGCONT)
    cancelled = [answer for answer in ended if answer.status_code == 499]
    assert [answer.headers["x-slackline-request-id"] for answer in cancelled] == [victim]
    assert json.loads(cancelled[0].content)["error"]["code"] == "cancelled"


def test_a_workflow_begun_at_one_gateway_is_cancelled_at_another_and_ends_where_it_runs(
    gateway: GatewayProcess, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = GatewayProcess(tmp_path / "other", gateway.key, gateway.secret)

    def call(at: GatewayProcess, method: str, path: str = "", **more: Any) -> dict[str, Any]:
        url = f"{at.url}/v1/workflows{path}"
        answer = requests.request(method, url, headers=bearer(gateway.secret), timeout=10, **more)
        assert answer.ok, answer.text
        found: dict[str, Any] = answer.json()
        return found

    try:
        assert call(gateway, "POST", json={"id": "w/1", "deadline": 60})["state"] == "open"
        metadata = {"workflow_id": "w/1"}
        assert other.ask(metadata=metadata).status_code == 200
        until(lambda: call(gateway, "GET", "/w%2F1")["answered"] == 1)
        running = other.ask(whole=False, metadata=metadata, max_tokens=2_000, stream=True)
        until(lambda: call(gateway, "GET", "/w%2F1")["running"] == 1)
        assert call(gateway, "POST", "/w%2F1/cancel")["state"] == "cancelled"
        assert '"code":"cancelled"' in running.text
        refused = other.ask(metadata=metadata)
        assert (refused.status_code, refused.json()["error"]["code"]) == (499, "cancelled")
        until(lambda: call(gateway, "GET", "/w/1")["running"] == 0)
        kept = until(lambda: RequestRecord.objects.filter(workflow="w/1", outcome="cancelled").first())
        assert kept.decisions[-1]["reason"] == "workflow_cancelled"
    finally:
        other.stop()


def test_a_workflow_that_is_cancelled_while_nothing_of_it_runs_is_not_in_time(gateway: GatewayProcess) -> None:
    """It was: no record said that it was cancelled, and all of its requests had been answered before."""
    url, key = f"{gateway.url}/v1/workflows", bearer(gateway.secret)
    began_at = timezone.now()
    for name in ("given-up", "kept"):
        assert requests.post(url, json={"id": name, "deadline": 6}, headers=key, timeout=10).status_code == 201
        assert gateway.ask(metadata={"workflow_id": name}).status_code == 200
    assert requests.post(f"{url}/given-up/cancel", headers=key, timeout=10).json()["state"] == "cancelled"
    until(lambda: WorkflowResult.objects.filter(workflow="given-up", cancelled_by="tenant").exists())
    until(lambda: WorkflowResult.objects.filter(workflow="kept").exists())
    rows = goodput(since=began_at, until=began_at + timedelta(minutes=2), by=("minute",))
    assert [sum(getattr(row, name) for row in rows) for name in ("finished", "in_time", "cancelled")] == [1, 1, 1]
    assert sum(row.goodput_tokens for row in rows) == 3 + 4
    given_up, kept = WorkflowResult.objects.order_by("workflow")
    assert (result_of(given_up), result_of(kept)) == ("cancelled", "in_time")
    assert (given_up.requests, given_up.failed, given_up.tokens) == (1, 0, 3 + 4)
    assert given_up.ends_at < kept.ends_at, "it ended when it was cancelled, not when it was due"


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Hanging servers: every process of theirs is stopped, their sockets stay open."""
    found = [psutil.Process(pid) for pid in pids]
    every = [process for parent in found for process in (parent, *parent.children(recursive=True))]
    for process in every:
        process.suspend()
    try:
        yield
    finally:
        for process in every:
            process.resume()


def test_hanging_redis_and_postgres_do_not_touch_the_data_path(
    gateway: GatewayProcess, postgres: EmbeddedPostgres, redis_server: EmbeddedRedis
) -> None:
    names = {gateway.ask().headers["x-slackline-request-id"]}
    slowest = 0.0
    assert postgres.pid is not None
    assert redis_server.pid is not None
    with stopped(postgres.pid, redis_server.pid):
        give_up_at = time.monotonic() + 3
        while time.monotonic() < give_up_at:
            answer = gateway.ask(stream=True)
            assert answer.status_code == 200
            names.add(answer.headers["x-slackline-request-id"])
            slowest = max(slowest, answer.elapsed.total_seconds())
    assert slowest < 1.0
    until(lambda: set(RequestRecord.objects.values_list("id", flat=True)) == names, 20)
    assert RequestRecord.objects.count() == len(names)
    until(lambda: live.read_fleet() and live.read_fleet()[0]["at"] > time.time() - 1)


def test_a_killed_gateway_goes_on_with_what_it_learned(tmp_path: Path, two_engines: list[EngineProcess]) -> None:
    def shown(gateway: GatewayProcess, metric: str) -> float | None:
        page = requests.get(gateway.url + "/metrics", timeout=5).text
        rows = [line.rpartition(" ")[2] for line in page.splitlines() if line.startswith(metric)]
        return float(rows[0]) if rows else None

    def last_sent() -> tuple[float, float]:
        """Frame and cutoff when the ordering gave out its last request."""
        (*_, decisions) = RequestRecord.objects.order_by("arrived_at").values_list("decisions", flat=True)
        (sent,) = (step["figures"] for step in decisions if step["kind"] == "dispatch")
        return sent["frame"], sent["cutoff"]

    by_calm = {"ordering": {"name": "calm", "frame_steps": 1}, "pacing": {"name": "fixed_window", "window": 1}}
    overrides = {"DISPATCH_OVERRIDES": json.dumps({**by_calm, "admission": {"name": "admit_all"}})}
    first = gateway_over(tmp_path, two_engines, **overrides)
    again = None
    try:
        assert shown(first, "slackline_learned_restored_age_seconds") == -1
        with ThreadPoolExecutor(20) as pool:  # some always wait, and CALM tries its cutoffs
            answers = list(pool.map(lambda _: first.ask(prompt="four" * 100), range(60)))
        answers.append(first.ask(prompt="four" * 100))
        assert {answer.status_code for answer in answers} == {200}
        until(lambda: RequestRecord.objects.count() == len(answers))
        file, ended = tmp_path / f"{first.name}.learned.json", time.time()
        until(lambda: file.exists() and file.stat().st_mtime > ended + 0.01, 5)
        first.process.kill()
        first.process.wait(5)
        frame, cutoff = last_sent()
        assert frame > 40, "the first value of the cutoff had its epoch"
        again = GatewayProcess(tmp_path, first.key, first.secret, name=first.name, **overrides)
        restored_s = shown(again, "slackline_learned_restored_age_seconds")
        assert restored_s is not None
        assert 0 <= restored_s < 20
        assert shown(again, 'slackline_attainment_ratio{slo_class="chat",tenant="acme"}') == 1.0
        assert again.ask(prompt="four" * 100).status_code == 200
        until(lambda: (shown(again, "slackline_learned_age_seconds") or -1.0) >= 0, 5)
        until(lambda: RequestRecord.objects.count() > len(answers))
        later_frame, later_cutoff = last_sent()
        assert (later_frame > frame, later_cutoff) == (True, cutoff), "frames go on from where they were"
    finally:
        first.stop()
        if again is not None:
            again.stop()


def test_a_gateway_starts_and_serves_beside_a_damaged_file_and_replaces_it(
    tmp_path: Path, two_engines: list[EngineProcess]
) -> None:
    first = gateway_over(tmp_path, two_engines)
    file, log = tmp_path / f"{first.name}.learned.json", tmp_path / "gateway.log"
    again = None
    try:
        assert first.ask().status_code == 200
        until(file.exists, 5)
        first.process.kill()
        first.process.wait(5)
        file.write_bytes(file.read_bytes()[:-20])
        damaged = file.read_bytes()
        again = GatewayProcess(tmp_path, first.key, first.secret, name=first.name)
        assert again.ask().status_code == 200
        assert f"what was learned before is not used, {file}: it was cut or changed" in log.read_text()
        until(lambda: file.read_bytes() != damaged, 5)
        assert LearnedFile(file).load(time.time()) is not None
    finally:
        first.stop()
        if again is not None:
            again.stop()


def test_shutdown_keeps_every_record(gateway: GatewayProcess) -> None:
    names = {gateway.ask().headers["x-slackline-request-id"] for _ in range(5)}
    assert gateway.stop() in (0, -signal.SIGTERM)  # uvicorn ends by the signal it was sent, after its shutdown
    assert set(RequestRecord.objects.values_list("id", flat=True)) == names
