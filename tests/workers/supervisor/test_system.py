"""The whole of `make up` on free ports: ready, serving, killed in parts, stopped, started again. About a minute."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil
import psycopg
import pytest
import requests

from tests.waiting import until
from workers.http.details import KEPT_S
from workers.supervisor.plan import ROOT
from workers.supervisor.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.long(250)]
READY_WITHIN_S = 120.0
STOP_WITHIN_S = 120.0  # the grace periods of all steps of a stop sum up to 90 s


class System:
    """One data folder and the supervisor that runs over it."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.gateway, self.console = (f"http://127.0.0.1:{port}" for port in (free_port(), free_port()))
        self.process = None
        self.output = self.folder / "up.log"

    def command(self, name, **output):
        ports = {"GATEWAY_PORT": self.gateway, "CONSOLE_PORT": self.console}
        environ = {variable: url.rpartition(":")[2] for variable, url in ports.items()}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DATABASE_", "REDIS_"))}
        return subprocess.Popen(
            [sys.executable, "-m", "workers.supervisor", name],
            env={**kept, **environ, "DATA_DIR": str(self.folder), "DEMO_LOAD": "0", "DJANGO_SETTINGS_MODULE": ""},
            cwd=ROOT,
            **(output or {"stdout": self.output.open("a"), "stderr": subprocess.STDOUT}),
        )

    def up(self):
        welcomes = self.output.read_text().count("is ready") if self.output.exists() else 0
        self.process = self.command("up")
        self.until(lambda: self.output.read_text().count("is ready") > welcomes, READY_WITHIN_S)
        assert self.health() == "ok"

    def until(self, condition, within_s=30.0):
        until(condition, within_s, every_s=0.2, what=lambda: self.output.read_text()[-3000:])

    def health(self):
        time.sleep(KEPT_S)  # the console gives an answer again for so long: this one is newer than the call
        try:
            return requests.get(f"{self.console}/healthz", timeout=10).json()["status"]
        except requests.RequestException:
            return ""

    def pid(self, name):
        rows = json.loads((self.folder / "processes.json").read_text())
        return next((row["pid"] for row in rows if row["name"].startswith(name)), None)

    def mine(self):
        """Every process that was told this data folder, the supervisor included, and PostgreSQL's own."""
        found = []
        for process in psutil.process_iter():
            try:
                told = process.environ().get("DATA_DIR") == str(self.folder)
                if (told or str(self.folder) in " ".join(process.cmdline())) and process.status() != "zombie":
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def key(self):
        return json.loads((self.folder / "credentials.json").read_text())["api_key"]

    def complete(self):
        body = {"model": "demo", "prompt": "Hello", "max_tokens": 4}
        headers = {"Authorization": f"Bearer {self.key()}"}
        return requests.post(f"{self.gateway}/v1/completions", json=body, headers=headers, timeout=20)

    def query(self, sql):
        port = json.loads((self.folder / "ports.json").read_text())["postgres"]
        with psycopg.connect(f"postgresql://postgres@127.0.0.1:{port}/slackline") as connection:
            return connection.execute(sql).fetchall()

    def outcomes(self, workflow):
        """Of the records that carry this workflow id."""
        return [row[0] for row in self.query(f"SELECT outcome FROM request_record WHERE workflow = '{workflow}'")]

    def instances(self):
        return dict(self.query("SELECT id, observed_state FROM instance WHERE desired_state = 'running'"))


async def stream(session, system, number):
    """ "done", "error event", or what went wrong otherwise."""
    prompt = " ".join(f"word{number}" for _ in range(200))
    body = {"model": "demo", "prompt": prompt, "max_tokens": 60, "stream": True, "slo_class": "batch"}
    body["metadata"] = {"workflow_id": "under-load"}
    headers = {"Authorization": f"Bearer {system.key()}"}
    async with session.post(f"{system.gateway}/v1/completions", json=body, headers=headers) as answer:
        text = (await answer.read()).decode()
    if answer.status != 200:
        return f"{answer.status}: {text[:200]}"
    if '"error"' in text:
        return "error event"
    return "done" if text.rstrip().endswith("data: [DONE]") else f"cut without a word: {text[-200:]}"


@pytest.fixture(scope="module")
def system():
    folder = tempfile.mkdtemp(prefix="slackline-system-")
    os.chmod(folder, 0o755)  # PostgreSQL's own user must be able to reach it
    running = System(folder)
    try:
        running.up()
        yield running
        running.process.send_signal(signal.SIGINT)
        running.process.wait(timeout=STOP_WITHIN_S)
    finally:
        for left in running.mine():
            left.kill()
        shutil.rmtree(folder, ignore_errors=True)


def test_it_says_where_to_go_and_serves(system):
    text = system.output.read_text()
    assert system.console in text
    assert "sk-slackline" in text
    answer = system.complete()
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-slackline-instance"] in system.instances()


def test_every_component_reports_itself(system):
    components = requests.get(f"{system.console}/healthz", timeout=10).json()["components"]
    assert set(components) == {"postgres", "redis", "gateway", "worker", "analysis", "beat", "jobs", "engines"}
    assert components["engines"]["ready"] == components["engines"]["total"] == 2


def test_a_second_one_over_the_same_data_is_refused(system):
    second = system.command("up")
    assert second.wait(timeout=30) == 1
    assert "already runs" in system.output.read_text()


def test_a_killed_engine_is_replaced(system):
    before = system.instances()
    victim = sorted(before)[0]
    os.kill(system.pid(f"engine {victim}"), signal.SIGKILL)
    system.until(lambda: victim not in system.instances() and list(system.instances().values()) == ["ready"] * 2)
    replaced = "SELECT reason, outcome->>'replacement' FROM decision WHERE kind = 'instance_replaced'"
    [(reason, started)] = system.query(f"{replaced} AND subject = '{victim}'")
    assert reason == "exited"
    assert started in system.instances()
    assert system.complete().status_code == 200


async def test_an_engine_killed_under_load_loses_no_request(system):
    """Before the first token a request finishes elsewhere; after it the stream ends with an error event."""
    count, victim = 40, sorted(system.instances())[0]
    async with aiohttp.ClientSession() as session:
        streams = [asyncio.create_task(stream(session, system, number)) for number in range(count)]
        await asyncio.sleep(0.5)  # some have their first token by now, some wait
        os.kill(system.pid(f"engine {victim}"), signal.SIGKILL)
        ends = await asyncio.gather(*streams)
    assert set(ends) <= {"done", "error event"}
    assert ends.count("done") >= count // 2
    system.until(lambda: len(system.outcomes("under-load")) == count)
    system.until(lambda: list(system.instances().values()) == ["ready"] * 2, within_s=60.0)
    assert system.outcomes("under-load").count("cut") == ends.count("error event")


def test_a_killed_worker_comes_back_and_decides_nothing_twice(system):
    worker = system.pid("worker")
    os.kill(worker, signal.SIGKILL)
    victim = sorted(system.instances())[0]
    os.kill(system.pid(f"engine {victim}"), signal.SIGKILL)  # something to decide while it is away
    system.until(lambda: system.pid("worker") not in (None, worker))
    system.until(lambda: victim not in system.instances() and list(system.instances().values()) == ["ready"] * 2)
    doubled = system.query(
        "SELECT subject, count(*) FROM decision WHERE kind = 'instance_replaced' GROUP BY 1 HAVING count(*) > 1"
    )
    assert doubled == []
    assert system.complete().status_code == 200


@pytest.mark.parametrize("name", ["beat", "redis", "postgres", "gateway"])
def test_what_is_killed_comes_back(system, name):
    killed = system.pid(name)
    os.kill(killed, signal.SIGKILL)
    system.until(lambda: system.pid(name) not in (None, killed))
    system.until(lambda: system.health() == "ok", within_s=60.0)
    assert system.complete().status_code == 200


def test_ctrl_c_leaves_no_process_and_it_starts_again_over_the_same_data(system):
    fleet = system.instances()
    assert len(system.mine()) >= 8
    system.process.send_signal(signal.SIGINT)
    assert system.process.wait(timeout=STOP_WITHIN_S) == 0
    assert [process.cmdline() for process in system.mine()] == []
    system.up()
    assert set(system.instances()) == set(fleet)
    assert system.complete().status_code == 200


def test_after_kill_9_of_the_supervisor_nothing_lasts_and_the_next_start_works(system):
    system.process.kill()
    system.process.wait()
    system.until(lambda: system.mine() == [], within_s=40.0)
    system.up()
    assert system.complete().status_code == 200


def test_down_stops_it(system):
    down = system.command("down")
    assert down.wait(timeout=STOP_WITHIN_S) == 0
    system.process.wait(timeout=5)
    assert system.mine() == []


def test_a_reader_that_ends_and_a_closed_terminal_leave_nothing_behind(system):
    """`make up | head`, then the window is closed."""
    if system.process.poll() is None:
        system.process.send_signal(signal.SIGTERM)
        assert system.process.wait(timeout=STOP_WITHIN_S) == 0
    reader, writer = os.pipe()
    system.process = system.command("up", stdout=writer, stderr=writer)
    os.close(writer)
    os.close(reader)
    system.until(lambda: system.health() == "ok", READY_WITHIN_S)
    for name in ("worker", "beat"):  # it says so, to nobody
        killed = system.pid(name)
        os.kill(killed, signal.SIGKILL)
        system.until(lambda name=name, killed=killed: system.pid(name) not in (None, killed))
    assert system.complete().status_code == 200
    system.process.send_signal(signal.SIGHUP)
    assert system.process.wait(timeout=STOP_WITHIN_S) == 0
    assert [process.cmdline() for process in system.mine()] == []
    assert not (system.folder / "processes.json").exists()
    assert "worker restarted" in (system.folder / "logs" / "supervisor.log").read_text()


def test_a_request_before_the_first_engine_is_up_waits_for_it():
    """The gateway listens seconds before an engine can serve: nobody is told of an outage, nor that all is ready."""
    folder = tempfile.mkdtemp(prefix="slackline-first-")
    os.chmod(folder, 0o755)
    fresh = System(folder)
    fresh.process = fresh.command("up")
    try:
        health = {}

        def listening():
            try:
                health.update(requests.get(f"{fresh.gateway}/healthz", timeout=2).json())
            except requests.RequestException:
                return False
            return health["status"] == "ok"

        fresh.until(listening, READY_WITHIN_S)
        assert "up" not in health["instances"].values()
        assert "is ready" not in fresh.output.read_text()
        headers = {"Authorization": f"Bearer {fresh.key()}"}
        body = {"model": "demo", "prompt": "Hello", "max_tokens": 4, "waiting_time": 90}
        answer = requests.post(f"{fresh.gateway}/v1/completions", json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        assert float(answer.headers["x-slackline-queue-ms"]) > 100
    finally:
        fresh.process.send_signal(signal.SIGINT)
        fresh.process.wait(timeout=STOP_WITHIN_S)
        for left in fresh.mine():
            left.kill()
        shutil.rmtree(folder, ignore_errors=True)
