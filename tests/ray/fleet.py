"""A model whose engines are jobs of the cluster: what is asked of the control API, and what the database tells."""

from __future__ import annotations

import sys
from typing import Any

import requests

from controller.engine.shipped_templates import SHIPPED
from tests.faults.system import System
from tests.ray.cluster import Cluster
from workers.supervisor.plan import ROOT

TEMPLATE = "reference-on-ray"
SLOTS = 4
READY_S = 60.0
PER_TOKEN = "constant:40ms"  # emulated: a step takes as long whatever is in it


class Fleet:
    def __init__(self, system: System, cluster: Cluster, model: str) -> None:
        self.system, self.cluster, self.model = system, cluster, model
        self.session = system.sign_in()
        self.call("launch-templates/by-name/" + TEMPLATE, template(), "PUT")
        self.call("models", {"name": model, "context_tokens": 4096})

    def call(self, path: str, body: dict[str, Any], method: str = "POST") -> dict[str, Any]:
        answer: requests.Response = self.system.control(self.session, path, body, method)
        assert answer.ok, f"{path}: {answer.text}"
        return answer.json()

    def start(self, id: str, template: str = TEMPLATE, **spec: Any) -> None:
        self.call("instances", {**INSTANCE, "id": id, "model": self.model, "template": template, "spec": spec})

    def stop(self, id: str) -> None:
        self.call(f"instances/{id}/stop", {})

    def end(self) -> None:
        """Stop all of them, and wait until the engines have ended."""
        if self.rows():
            self.policy(enabled=False)
        for id in self.rows():
            self.stop(id)
        self.system.until(lambda: not self.rows("draining") and self.stopped(), READY_S)

    def policy(self, **fields: Any) -> None:
        """Change the model's scaling policy; made with the first change."""
        listed = self.session.get(f"{self.system.console}/api/v1/scaling-policies", timeout=10).json()["items"]
        mine = [each for each in listed if each["model"] == self.model]
        if not mine:
            self.call(
                "scaling-policies", {"model": self.model, "sustain_s": 3.0, "cooldown_s": 2.0, "warm": 0, **fields}
            )
        else:
            self.call(f"scaling-policies/{mine[0]['id']}", {**fields, "version": mine[0]["version"]}, "PATCH")

    def hold(self, count: int, within_s: float = READY_S) -> float:
        """Exactly so many instances, whatever the load; seconds until they were ready and the others had ended."""
        if not self.rows():
            self.start(f"{self.model}-first")
        self.policy(min_instances=count, max_instances=count)
        return self.system.until(
            lambda: len(self.ready()) == count == len(self.rows()) and not self.rows("draining") and self.stopped(),
            within_s,
        )

    def rows(self, desired: str = "running") -> dict[str, str]:
        """Observed states by id."""
        sql = """SELECT i.id, i.observed_state FROM instance i JOIN served_model m ON m.id = i.model_id
                 WHERE m.name = %s AND i.desired_state = %s"""
        return dict(self.system.query(sql, self.model, desired))

    def made(self) -> set[str]:
        """Every instance that there was."""
        return {id for desired in ("running", "draining", "stopped") for id in self.rows(desired)}

    def stopped(self) -> bool:
        """Whether all that shall not run have ended."""
        return set(self.rows("stopped").values()) <= {"stopped", "failed"}

    def ready(self) -> list[str]:
        return sorted(id for id, state in self.rows().items() if state == "ready")

    def column(self, name: str, id: str) -> Any:
        [(value,)] = self.system.query(f"SELECT {name} FROM instance WHERE id = %s", id)
        return value

    def nodes(self) -> dict[str, str]:
        """Address of the node by ready instance."""
        return {id: self.column("url", id).removeprefix("http://").partition(":")[0] for id in self.ready()}

    def look(self, cluster: str = "default") -> tuple[Any, Any, str, int]:
        """Of a cluster: seen_at, failing_since, error, instances."""
        sql = "SELECT seen_at, failing_since, error, instances FROM provisioner_look WHERE name = %s"
        return self.system.query(sql, f"ray/{cluster}")[0]

    def page(self, path: str = "fleet/") -> str:
        """Of the console, with single spaces."""
        answer = self.session.get(f"{self.system.console}/{path}", timeout=10)
        assert answer.status_code == 200, path
        return " ".join(answer.text.split())


INSTANCE = {"backend": "reference", "provisioner": "ray", "template": TEMPLATE, "max_num_seqs": SLOTS}


def template() -> dict[str, Any]:
    """The shipped one for the reference engine, with the Python and the folder of this checkout, on one device."""
    shipped = SHIPPED["reference"]
    command = [sys.executable, *shipped["command"][1:], "--profile", PER_TOKEN]
    return {
        **{name: value for name, value in shipped.items() if name != "roles"},
        "command": command,
        "environment": {"PYTHONPATH": str(ROOT)},
        "spec": {"resources": {"device": 1}},
    }
