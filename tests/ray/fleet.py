"""A model whose engines are jobs of the cluster: what is asked of the control API, and what the database tells."""

from __future__ import annotations

import sys
from typing import Any

import requests

from controller.engine.shipped_templates import SHIPPED
from tests.faults.system import System
from tests.ray.cluster import Cluster
from workers.supervisor.plan import ROOT

MODEL, TEMPLATE = "on-ray", "reference-on-ray"
SLOTS = 4
READY_S = 60.0
PER_TOKEN = "constant:40ms"  # emulated: a step takes as long whatever is in it


class Fleet:
    """`first`: id of the instance that the others are started like."""

    first = "ray-first"

    def __init__(self, system: System, cluster: Cluster) -> None:
        self.system, self.cluster = system, cluster
        self.session = system.sign_in()
        self.call("launch-templates/by-name/" + TEMPLATE, template(), "PUT")
        self.call("models", {"name": MODEL, "context_tokens": 4096})

    def call(self, path: str, body: dict[str, Any], method: str = "POST") -> dict[str, Any]:
        answer: requests.Response = self.system.control(self.session, path, body, method)
        assert answer.ok, f"{path}: {answer.text}"
        return answer.json()

    def start(self, id: str) -> None:
        self.call("instances", {**INSTANCE, "id": id})

    def rows(self, desired: str = "running") -> dict[str, str]:
        """Observed states by id."""
        sql = """SELECT i.id, i.observed_state FROM instance i JOIN served_model m ON m.id = i.model_id
                 WHERE m.name = %s AND i.desired_state = %s"""
        return dict(self.system.query(sql, MODEL, desired))

    def ready(self) -> list[str]:
        return sorted(id for id, state in self.rows().items() if state == "ready")

    def column(self, name: str, id: str) -> Any:
        [(value,)] = self.system.query(f"SELECT {name} FROM instance WHERE id = %s", id)
        return value

    def nodes(self) -> dict[str, str]:
        """Address of the node by ready instance."""
        return {id: self.column("url", id).removeprefix("http://").partition(":")[0] for id in self.ready()}

    def look(self) -> tuple[Any, Any, str, int]:
        """Of the cluster: seen_at, failing_since, error, instances."""
        sql = "SELECT seen_at, failing_since, error, instances FROM provisioner_look WHERE name = 'ray/default'"
        return self.system.query(sql)[0]


INSTANCE = {
    "model": MODEL, "backend": "reference", "provisioner": "ray", "template": TEMPLATE, "max_num_seqs": SLOTS,
}  # fmt: skip


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
