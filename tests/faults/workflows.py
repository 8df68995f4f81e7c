"""Workflows while a server is away: steps with a checkpoint, forks, branches, and what needs Redis to be answered."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import requests

from tests.faults.load import Sent
from tests.faults.system import System

EVERY_S = 1.0
TIMEOUT_S = 20.0
RETENTION_S = 600
STEADY = "steady"  # the workflow of which each round makes one call, which names the one before as its parent
AWAY = "workflows_unavailable"


@dataclass(slots=True)
class Told:
    """An answer to what needs the state of workflows: `fork` or `open`. Monotonic seconds."""

    kind: str
    at: float
    status: int
    code: str
    message: str
    took_s: float


@dataclass(slots=True)
class Workflows:
    """`with Workflows(system) as found:` goes round after round until the block ends. `sent`: the calls."""

    system: System
    sent: list[Sent] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    steady: int = 0  # calls of STEADY that were answered
    _steady_at: list[float] = field(default_factory=list)  # monotonic: when each of these was sent
    _name: str = field(default_factory=lambda: f"w{time.time():.0f}")
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Workflows:
        self._keep_answers()
        self._thread = threading.Thread(target=self._run, name="workflows")
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        assert self._thread is not None
        self._thread.join(6 * TIMEOUT_S)
        assert not self._thread.is_alive(), "calls without an end"

    def _keep_answers(self) -> None:
        """A step is kept, and its checkpoint with it, of tenants with a retention alone."""
        session = self.system.sign_in()
        tenants = session.get(f"{self.system.console}/api/v1/tenants", timeout=10).json()["items"]
        (demo,) = (each for each in tenants if each["name"] == "demo")
        change = {"retention_s": RETENTION_S, "version": demo["version"]}
        answer = self.system.control(session, f"tenants/{demo['id']}", change, "PATCH")
        assert answer.status_code == 200, answer.text

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(EVERY_S):
            number += 1
            self._round(f"{self._name}-{number}")

    def _round(self, name: str) -> None:
        prompt = f"plan {name} " * 20
        self._call(prompt, metadata={"workflow_id": name, "step_key": "plan"}, checkpoint=60, workflow_deadline=60)
        fork = self._ask("fork", f"/v1/workflows/{name}/fork", {"step": "plan", "branches": 1})
        (branch,) = fork.get("branches", ["fork-unknown-0"])
        self._call(f"{prompt} and go on", branch=branch, metadata={"workflow_id": name, "parents": ["plan"]})
        self._ask("open", "/v1/workflows", {"deadline": 60})
        parents = [f"step-{self.steady}"] if self.steady else []
        step = {"workflow_id": self.steady_name, "step_key": f"step-{self.steady + 1}", "parents": parents}
        self._call(prompt, metadata=step, workflow_deadline=600)
        if self.sent[-1].ended == "done":
            self.steady += 1
            self._steady_at.append(self.sent[-1].at)

    @property
    def steady_name(self) -> str:
        return f"{self._name}-{STEADY}"

    def _call(self, prompt: str, **fields: Any) -> None:
        sent = Sent(time.monotonic(), streamed=False)
        self.sent.append(sent)
        body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "slo_class": "standard"}
        answer = self._post("/v1/completions", {**body, **fields})
        sent.id = answer.headers.get("x-slackline-request-id", "")
        sent.took_s, sent.text = time.monotonic() - sent.at, answer.text
        sent.ended = "done" if answer.status_code == 200 else f"{answer.status_code} {answer.json()['error']['code']}"

    def _ask(self, kind: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        at = time.monotonic()
        answer = self._post(path, body)
        found = answer.json()
        error = found.get("error", {"code": "", "message": ""})
        took_s = time.monotonic() - at
        self.told.append(Told(kind, at, answer.status_code, error["code"], error["message"], took_s))
        return found

    def _post(self, path: str, body: dict[str, Any]) -> requests.Response:
        headers = {"Authorization": f"Bearer {self.system.key()}"}
        return requests.post(self.system.gateway + path, json=body, headers=headers, timeout=TIMEOUT_S)

    # -- figures -------------------------------------------------------------------------------------------------

    def counted(self) -> tuple[int, int]:
        """Requests and answers of the steady workflow, as its client is told them; zeros if it is not known."""
        url = f"{self.system.gateway}/v1/workflows/{self.steady_name}"
        found = requests.get(url, headers={"Authorization": f"Bearer {self.system.key()}"}, timeout=TIMEOUT_S).json()
        return found.get("requests", 0), found.get("answered", 0)

    def steady_since(self, at: float) -> int:
        """Answered calls of STEADY that were sent at `at` (monotonic) or later."""
        return sum(sent >= at for sent in self._steady_at)

    def between(self, start: float, end: float) -> list[Told]:
        return [each for each in list(self.told) if start <= each.at < end]
