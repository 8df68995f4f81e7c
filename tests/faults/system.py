"""`make up` as a process, over servers of the test's own that it may stop: what is killed here comes back by itself."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg
import requests

from tests.waiting import until
from tests.workers.supervisor.small_system import processes_of
from workers.http.details import KEPT_S
from workers.supervisor.plan import ROOT
from workers.supervisor.ports import free_port

READY_S = 120.0
STOP_S = 60.0


class System:
    """One data folder and the supervisor that runs over it. `settings`: further variables of its environment."""

    def __init__(self, database_url: str, redis_url: str, settings: Mapping[str, str] | None = None) -> None:
        self.settings = dict(settings or {})
        self.folder = Path(tempfile.mkdtemp(prefix="slackline-faults-"))
        self.database_url, self.redis_url = database_url, redis_url
        self.gateway, self.console = (f"http://127.0.0.1:{port}" for port in (free_port(), free_port()))
        self.output = self.folder / "up.log"
        self.process: subprocess.Popen[bytes] | None = None

    # -- life ----------------------------------------------------------------------------------------------------

    def up(self) -> float:
        """Seconds until it said that it is ready."""
        began, said = time.monotonic(), self._welcomes()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "workers.supervisor", "up"],
            env=self._environment(),
            cwd=ROOT,
            stdout=self.output.open("a"),
            stderr=subprocess.STDOUT,
        )
        self.until(lambda: self._welcomes() > said, READY_S)
        return time.monotonic() - began

    def stop(self, how: int = signal.SIGTERM) -> int:
        """Its exit code."""
        assert self.process is not None
        self.process.send_signal(how)
        return self.process.wait(timeout=STOP_S)

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("SLACKLINE_ROLE", "SECRET_KEY")}
        ports = {"GATEWAY_PORT": self.gateway, "CONSOLE_PORT": self.console}
        told = {variable: url.rpartition(":")[2] for variable, url in ports.items()}
        told |= {"DATA_DIR": str(self.folder), "DEMO_LOAD": "0", "DJANGO_SETTINGS_MODULE": ""}
        return {**kept, **told, "DATABASE_URL": self.database_url, "REDIS_URL": self.redis_url, **self.settings}

    def _welcomes(self) -> int:
        return self.output.read_text().count("is ready") if self.output.exists() else 0

    def until(self, condition: Callable[[], Any], within_s: float = 30.0) -> float:
        """Seconds waited. Fails at once if the system ended by itself."""

        def met() -> bool:
            if condition():
                return True
            assert self.process is None or self.process.poll() is None, f"it ended by itself:\n{self.report()}"
            return False

        began = time.monotonic()
        until(met, within_s, every_s=0.1, what=self.report)
        return time.monotonic() - began

    def report(self) -> str:
        """What a reader of a failure needs before the folder is gone: each component's state, the ends of all logs."""
        try:
            health = requests.get(f"{self.console}/healthz", timeout=10).text
        except requests.RequestException as error:
            health = repr(error)
        logs = sorted((self.folder / "logs").glob("*.log")) if self.folder.exists() else []
        ends = [f"-- {log.name}\n{log.read_text(errors='replace')[-2500:]}" for log in logs]
        return "\n".join([self.output.read_text()[-3000:], health, *ends])

    # -- processes -----------------------------------------------------------------------------------------------

    def pid(self, name: str) -> int | None:
        rows = json.loads((self.folder / "processes.json").read_text())
        return next((row["pid"] for row in rows if row["name"] == name), None)

    def kill(self, name: str) -> int:
        pid = self.pid(name)
        assert pid is not None, f"no {name} is running"
        os.kill(pid, signal.SIGKILL)
        return pid

    def processes(self) -> list[psutil.Process]:
        """Everything that was told this data folder, the supervisor included."""
        return processes_of(self.folder)

    # -- what it says --------------------------------------------------------------------------------------------

    def credentials(self) -> dict[str, Any]:
        return json.loads((self.folder / "credentials.json").read_text())

    def key(self) -> str:
        return self.credentials()["api_key"]

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.database_url, connect_timeout=5) as connection:
            return connection.execute(sql, values).fetchall()

    def instances(self) -> dict[str, str]:
        """Observed states of those that shall run."""
        return dict(self.query("SELECT id, observed_state FROM instance WHERE desired_state = 'running'"))

    def steady(self, count: int = 2) -> bool:
        return list(self.instances().values()) == ["ready"] * count and self.healthy()

    def healthy(self) -> bool:
        time.sleep(KEPT_S)  # the console gives an answer again for so long: this one is newer than the call
        try:
            return requests.get(f"{self.console}/healthz", timeout=10).json()["status"] == "ok"
        except requests.RequestException:
            return False

    def gateway_health(self) -> dict[str, Any]:
        time.sleep(KEPT_S)
        return requests.get(f"{self.gateway}/healthz", timeout=5).json()

    def metric(self, name: str) -> float:
        """A figure of the gateway's /metrics, summed over its labels. Raises KeyError for one it does not have."""
        time.sleep(KEPT_S)
        return total_of(requests.get(f"{self.gateway}/metrics", timeout=5).text, name)

    def sign_in(self, person: str = "admin") -> requests.Session:
        session = requests.Session()
        session.get(f"{self.console}/login/", timeout=10)
        known = self.credentials()
        form = {"username": known[person], "password": known[f"{person}_password"]}
        form["csrfmiddlewaretoken"] = _csrf(session)
        answer = session.post(f"{self.console}/login/", data=form, timeout=10, allow_redirects=False)
        assert answer.status_code == 302, answer.text[:500]
        return session

    def control(
        self, session: requests.Session, path: str, body: dict[str, Any], method: str = "POST"
    ) -> requests.Response:
        headers = {"X-CSRFToken": _csrf(session), "Referer": self.console}
        return session.request(method, f"{self.console}/api/v1/{path}", json=body, headers=headers, timeout=10)

    def hurry_scaler(self) -> None:
        """Acts again after two seconds, and scales in after three: the tests need not wait half a minute."""
        session = self.sign_in()
        for policy in session.get(f"{self.console}/api/v1/scaling-policies", timeout=10).json()["items"]:
            change = {"sustain_s": 3.0, "cooldown_s": 2.0, "version": policy["version"]}
            answer = self.control(session, f"scaling-policies/{policy['id']}", change, "PATCH")
            assert answer.status_code == 200, answer.text


@contextmanager
def running_system(database_url: str, redis_url: str, settings: Mapping[str, str] | None = None) -> Iterator[System]:
    """A system that is up, and nothing left of it afterwards."""
    system = System(database_url, redis_url, settings)
    try:
        system.up()
        yield system
    finally:
        system.stop()
        left = system.processes()
        for process in left:
            process.kill()
        shutil.rmtree(system.folder, ignore_errors=True)
    assert left == [], "processes left behind"


def total_of(page: str, name: str) -> float:
    """One metric of a Prometheus page, summed over its labels. A misspelt name must not read as zero: KeyError."""
    found = [line for line in page.splitlines() if line.split("{")[0].split(" ")[0] == name]
    if not found and f"# TYPE {name} " not in page:
        raise KeyError(name)
    return sum(float(line.rpartition(" ")[2]) for line in found)


def _csrf(session: requests.Session) -> str:
    return next(cookie.value or "" for cookie in session.cookies if "csrf" in cookie.name.lower())
